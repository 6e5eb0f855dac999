from __future__ import annotations

from pipeline.dispatch import STRAGGLER_MIN_S, Pace, ShardQueue
from pipeline.records import Shard


def shard(index: int, num_rows: int, num_bytes: int = 0) -> Shard:
    return Shard(index, "in.parquet", 0, num_rows, num_bytes=num_bytes)


def drained(queue: ShardQueue, now: float = 0.0, is_busy: bool = False) -> list[int]:
    taken = []
    while (index := queue.take(now, is_busy)) is not None:
        taken.append(index)
    return taken


def test_the_longest_expected_come_first_and_equals_in_order() -> None:
    queue = ShardQueue([shard(0, 2), shard(1, 8, 10), shard(2, 8, 900), shard(3, 2), shard(4, 5)])
    assert len(queue) == 5
    assert drained(queue) == [2, 1, 4, 0, 3]
    assert len(queue) == 0


def test_what_was_tried_before_comes_first_when_its_time_has_come() -> None:
    queue = ShardQueue([shard(0, 8), shard(1, 8)])
    queue.put_back(7, not_before=5.0, needs_own_worker=False)
    assert queue.take(4.9, is_busy=True) == 0
    assert queue.take(5.0, is_busy=True) == 7
    assert drained(queue, now=5.0) == [1]


def test_busy_workers_run_dry_for_a_shard_that_needs_one_of_its_own() -> None:
    queue = ShardQueue([shard(0, 8)])
    queue.put_back(7, not_before=0.0, needs_own_worker=True)
    assert queue.take(1.0, is_busy=True) is None
    assert queue.take(1.0, is_busy=False) == 7
    assert queue.take(1.0, is_busy=True) == 0


def test_a_straggler_is_told_by_what_other_rows_took() -> None:
    pace = Pace()
    for seconds in (30.0, 40.0):
        pace.learn(10, seconds)
    assert not pace.is_straggling(10, 1000.0), "two shards say little"
    pace.learn(5, 500.0)  # the median stays at 4 s a row
    assert not pace.is_straggling(10, 79.0)
    assert pace.is_straggling(10, 81.0)
    assert not pace.is_straggling(1, STRAGGLER_MIN_S - 1), "a second attempt would end no sooner"
    assert pace.is_straggling(1, STRAGGLER_MIN_S + 1)
