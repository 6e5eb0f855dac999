"""Time as a report shows it: seconds since the first attempt at a shard, without the hours between two runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.records import PartReceipt

LONGEST_PAUSE_S = 60.0
"""When no attempt was at work for longer than this, the job was interrupted, and the time is left out."""

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Clock:
    """Busy intervals in Unix seconds, in order and apart."""

    busy: tuple[Interval, ...]

    @property
    def total_s(self) -> float:
        return sum(end - start for start, end in self.busy)

    def at(self, moment: float) -> float:
        """Seconds of busy time before a moment. With busy (10, 20) and (100, 130), moment 110 is at 20."""
        return sum(min(end, moment) - start for start, end in self.busy if start < moment)

    @property
    def pauses(self) -> list[Interval]:
        """(when on this clock, how many seconds were left out) for every interruption."""
        gaps = zip(self.busy, self.busy[1:], strict=False)
        return [(self.at(before[1]), after[0] - before[1]) for before, after in gaps]


def interval_of(receipt: PartReceipt) -> Interval:
    return receipt.began, receipt.began + receipt.seconds


def make_clock(receipts: Sequence[PartReceipt]) -> Clock:
    """Intervals of all attempts, those that are less than `LONGEST_PAUSE_S` apart joined."""
    busy: list[Interval] = []
    for start, end in sorted(map(interval_of, receipts)):
        if busy and start - busy[-1][1] <= LONGEST_PAUSE_S:
            busy[-1] = busy[-1][0], max(busy[-1][1], end)
        else:
            busy.append((start, end))
    return Clock(tuple(busy))


def spread(intervals: Sequence[Interval], amounts: Sequence[float], total_s: float, bins: int) -> list[float]:
    """Amount per second in each bin of [0, total_s], every amount spread evenly over its interval.

    Worked example: amount 6 over (1, 4) in two bins of 2 s gives 2 of it to the first (1 per s), 4 to the second (2).
    """
    width = total_s / bins
    rates = [0.0] * bins
    for (start, end), amount in zip(intervals, amounts, strict=True):
        rate = amount / max(end - start, 1e-9)
        for index in range(int(start / width), min(bins, int(end / width) + 1)):
            shared = min(end, (index + 1) * width) - max(start, index * width)
            rates[index] += rate * max(shared, 0.0) / width
    return rates
