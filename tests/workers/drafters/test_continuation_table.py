from __future__ import annotations

from workers.drafters.continuation_table import Candidates, ContinuationTable


def row(token: int) -> Candidates:
    return (token, token + 1), (0.75, 0.25)


def test_rows_are_found_by_context() -> None:
    table = ContinuationTable(capacity=8)
    table.store((1,), row(10))
    table.store((1, 2), row(20))
    assert table.get((1,)) == ((10, 11), (0.75, 0.25))
    assert table.get((1, 2)) == row(20)
    assert table.get((2,)) is None
    assert (1,) in table
    assert (2,) not in table


def test_the_newest_row_overwrites() -> None:
    table = ContinuationTable(capacity=8)
    for context, token in (((1,), 10), ((1,), 30), ((2,), 40), ((1,), 50)):
        table.store(context, row(token))
    assert table.get((1,)) == row(50)
    assert len(table) == 2


def test_the_context_that_was_stored_longest_ago_is_dropped() -> None:
    table = ContinuationTable(capacity=2)
    for context, token in (((1,), 10), ((2,), 20), ((1,), 30), ((3,), 40)):
        table.store(context, row(token))
    assert len(table) == 2
    assert table.get((2,)) is None
    assert table.get((1,)) == row(30)
    assert table.get((3,)) == row(40)


def test_overwriting_a_full_table_drops_nothing() -> None:
    table = ContinuationTable(capacity=2)
    for context, token in (((1,), 10), ((2,), 20), ((2,), 30)):
        table.store(context, row(token))
    assert table.get((1,)) == row(10)
    assert table.get((2,)) == row(30)
