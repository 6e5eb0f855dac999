"""What happened when: throughput, windows, who worked on which shard, restarts, and the tail."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from jobs.reporting.clock import Clock, Interval, interval_of, make_clock, spread
from jobs.reporting.stored_job import StoredJob
from pipeline.records import PartReceipt

MOST_BINS = 120
MOST_LANES = 100
STRAGGLING = 2.0
"""An attempt is marked that took so many times the median of all."""
ENOUGH_SHARDS = 5


def timeline(job: StoredJob) -> dict[str, Any] | None:
    """Everything that has a time axis; None when no receipt says when it was."""
    receipts = job.timed_receipts
    if not receipts:
        return None
    clock = make_clock(receipts)
    spans = [(clock.at(start), clock.at(end)) for start, end in map(interval_of, receipts)]
    return {
        "total_s": clock.total_s,
        "untimed": len(job.receipts) - len(receipts),
        "pauses": clock.pauses,
        "throughput": _throughput(receipts, spans, clock),
        "by_shard": _by_shard(receipts, spans),
        "workers": _workers(receipts, spans, clock),
        "tail": _tail(receipts, spans),
    }


def _throughput(receipts: Sequence[PartReceipt], spans: Sequence[Interval], clock: Clock) -> dict[str, Any]:
    """A shard's tokens are taken to have come evenly over its attempt, which is all that its receipt tells."""
    total = clock.total_s
    bins = max(1, min(MOST_BINS, 2 * len(receipts), int(total)))
    tokens = spread(spans, [receipt.completion_tokens for receipt in receipts], total, bins)
    ends = sorted((end, receipt.num_rows) for (_, end), receipt in zip(spans, receipts, strict=True))
    done, rows = [[0.0, 0]], 0
    for end, count in ends:
        rows += count
        done.append([round(end, 3), rows])
    return {
        "bin_s": total / bins,
        "tokens_per_s": [round(value, 2) for value in tokens],
        "attempts": [round(value, 2) for value in spread(spans, [end - start for start, end in spans], total, bins)],
        "rows_done": _thinned(done, 2 * MOST_BINS),
    }


def _by_shard(receipts: Sequence[PartReceipt], spans: Sequence[Interval]) -> list[list[float]]:
    """(end, mean window, tokens per step, shard) of each shard that drafted, in order of time."""
    points = [
        [round(end, 3), round(receipt.stats.mean_window, 3), round(receipt.stats.mean_acceptance_length, 3), index]
        for (_, end), receipt in zip(spans, receipts, strict=True)
        if receipt.stats.num_steps
        for index in [receipt.shard_index]
    ]
    return _thinned(sorted(points), 20 * MOST_BINS)


def _workers(receipts: Sequence[PartReceipt], spans: Sequence[Interval], clock: Clock) -> dict[str, Any]:
    """A lane for each worker, a bar for each attempt that delivered, a mark where a worker's process was replaced.

    A worker has up to two shards in hand, so bars of one lane may overlap; each has a row of the lane for itself.
    """
    slow_s = STRAGGLING * median(receipt.seconds for receipt in receipts)
    lanes: dict[str, list[tuple[Interval, PartReceipt]]] = defaultdict(list)
    for span, receipt in zip(spans, receipts, strict=True):
        lanes[receipt.worker].append((span, receipt))
    by_end = sorted(lanes, key=lambda worker: -max(end for (_, end), _ in lanes[worker]))
    shown = sorted(by_end[:MOST_LANES], key=_natural)
    bars, restarts = [], []
    for lane, worker in enumerate(shown):
        attempts = sorted(lanes[worker], key=lambda attempt: attempt[0])
        free = [0.0, 0.0]
        for (start, end), receipt in attempts:
            row = 0 if free[0] <= start + 1e-6 or free[0] <= free[1] else 1
            free[row] = end
            is_slow = len(receipts) >= ENOUGH_SHARDS and receipt.seconds > slow_s
            kind = "redone" if receipt.attempt > 1 else "slow" if is_slow else "first"
            figures = [receipt.shard_index, receipt.attempt, receipt.num_rows, receipt.completion_tokens]
            bars.append([lane, row, round(start, 3), round(end, 3), kind, *figures])
        restarts += [[lane, round(clock.at(moment), 3)] for moment in replacements(receipt for _, receipt in attempts)]
    return {
        "lanes": shown,
        "hidden": len(lanes) - len(shown),
        "bars": bars,
        "restarts": restarts,
        "slow_s": slow_s,
        "num_slow": sum(receipt.seconds > slow_s for receipt in receipts) if len(receipts) >= ENOUGH_SHARDS else 0,
        "num_redone": sum(receipt.attempt > 1 for receipt in receipts),
        "num_restarts": len(replacements(receipts)),
    }


def replacements(receipts: Iterable[PartReceipt]) -> list[float]:
    """When processes began that took the place of another one of the same worker in the same run, as far as both
    delivered anything."""
    processes: dict[tuple[str, str], set[float]] = defaultdict(set)
    for receipt in receipts:
        if receipt.worker_began:
            processes[receipt.worker, run_of(receipt)].add(receipt.worker_began)
    return sorted(moment for moments in processes.values() for moment in sorted(moments)[1:])


def run_of(receipt: PartReceipt) -> str:
    """The run of the driver, from the name of the part: `data/part-00042-RUN-ATTEMPT.parquet`."""
    return receipt.path.split("-")[-2]


def _tail(receipts: Sequence[PartReceipt], spans: Sequence[Interval]) -> dict[str, float]:
    """From when the first of the workers at the end had nothing left to do until the last one had delivered.

    Worked example: workers end at 80, 95 and 100 s: a tail of 20 s, in which (20 + 5) of 60 worker-seconds were idle.
    """
    last: dict[str, float] = {}
    for (_, end), receipt in zip(spans, receipts, strict=True):
        last[receipt.worker] = max(end, last.get(receipt.worker, 0.0))
    end = max(last.values())
    rows = sum(receipt.num_rows for receipt in receipts)
    return {
        "tail_s": end - min(last.values()),
        "idle_s": sum(end - moment for moment in last.values()),
        "idle_share": sum(end - moment for moment in last.values()) / max(end * len(last), 1e-9),
        **{f"rows_{share}_s": _when_done(receipts, spans, rows * share / 100) for share in (50, 90, 99)},
    }


def _when_done(receipts: Sequence[PartReceipt], spans: Sequence[Interval], rows: float) -> float:
    """When so many rows were delivered."""
    done = 0
    for end, count in sorted((end, receipt.num_rows) for (_, end), receipt in zip(spans, receipts, strict=True)):
        done += count
        if done >= rows:
            return end
    return 0.0


def _thinned(points: list[list[float]], most: int) -> list[list[float]]:
    """At most so many of them, the last one kept."""
    step = -(-len(points) // most)
    return points if step <= 1 else [*points[:-1:step], points[-1]]


def _natural(name: str) -> tuple[str, int]:
    """`worker-10` after `worker-9`."""
    head, _, number = name.rpartition("-")
    return (head, int(number)) if number.isdigit() else (name, 0)
