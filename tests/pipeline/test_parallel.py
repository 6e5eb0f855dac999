from __future__ import annotations

import threading

import pytest

from pipeline.parallel import THREADS, in_order


def test_results_come_in_order_from_several_threads() -> None:
    together = threading.Barrier(THREADS, timeout=30)

    def wait(i: int) -> int:
        together.wait()
        return i * i

    assert list(in_order(wait, range(4 * THREADS))) == [i * i for i in range(4 * THREADS)]


def test_the_first_error_in_order_is_raised_and_nothing_is_begun_after() -> None:
    begun = []
    later_failed = threading.Event()

    def fail(i: int) -> int:
        begun.append(i)
        if i == 5:
            later_failed.wait(30)  # it fails after one that comes later
        if i == 9:
            later_failed.set()
        if i in (5, 9):
            raise ValueError(f"item {i}")
        return i

    results = in_order(fail, range(10**6))
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="item 5"):
        next(results)
    assert len(begun) < 100


def test_whoever_stops_early_leaves_no_thread() -> None:
    for i in in_order(lambda i: i, range(10**6)):
        if i == 3:
            break
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reader")]
