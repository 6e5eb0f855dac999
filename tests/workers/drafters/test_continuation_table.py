from __future__ import annotations

import numpy as np

from workers.drafters.continuation_table import ContinuationTable


def rows(*tokens: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """One row of two candidates (t, t + 1) for each token."""
    return np.array([[token, token + 1] for token in tokens])


def probs(count: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.array([[0.75, 0.25]] * count, np.float32)


def test_rows_are_found_by_context() -> None:
    table = ContinuationTable(top_k=2, capacity=8)
    table.store([(1,), (1, 2)], rows(10, 20), probs(2))
    assert table.get((1,)) == ([10, 11], [0.75, 0.25])
    assert table.get((1, 2)) == ([20, 21], [0.75, 0.25])
    assert table.get((2,)) is None


def test_the_newest_row_overwrites_also_within_one_call() -> None:
    table = ContinuationTable(top_k=2, capacity=8)
    table.store([(1,)], rows(10), probs(1))
    table.store([(1,), (2,), (1,)], rows(30, 40, 50), probs(3))
    assert table.get((1,)) == ([50, 51], [0.75, 0.25])
    assert len(table) == 2


def test_the_context_that_was_stored_longest_ago_is_dropped() -> None:
    table = ContinuationTable(top_k=2, capacity=2)
    table.store([(1,), (2,), (1,), (3,)], rows(10, 20, 30, 40), probs(4))
    assert len(table) == 2
    assert table.get((2,)) is None
    assert table.get((1,)) == ([30, 31], [0.75, 0.25])
    assert table.get((3,)) == ([40, 41], [0.75, 0.25])


def test_more_rows_than_capacity() -> None:
    table = ContinuationTable(top_k=2, capacity=2)
    table.store([(i,) for i in range(5)], rows(*range(0, 50, 10)), probs(5))
    assert [table.get((i,)) is not None for i in range(5)] == [False, False, False, True, True]
    assert table.get((4,)) == ([40, 41], [0.75, 0.25])
