"""How many samples a step decoded, and how much of a draft each of them got: kept per step, pooled for receipts."""

from __future__ import annotations

from pipeline.records import OccupancyClass


class OccupancyCounts:
    """One thread counts, others take. A step counted while another one takes may be lost: it only informs."""

    def __init__(self) -> None:
        self._counts: dict[int, list[int]] = {}

    def count(self, decoding: int, draft_rows: int, emitted: int) -> None:
        """A step in which so many samples decoded, and emitted so many tokens together."""
        counts = self._counts.setdefault(decoding, [0, 0, 0])
        counts[0] += 1
        counts[1] += draft_rows
        counts[2] += emitted

    def take(self) -> tuple[OccupancyClass, ...]:
        """What was counted since the last call, by powers of two.

        Worked example: steps of 2 and of 3 samples are both in the class of at least 2, steps of 4 are not.
        """
        taken, self._counts = self._counts, {}
        classes: dict[int, list[int]] = {}
        for decoding, (steps, draft_rows, emitted) in sorted(taken.items()):
            pooled = classes.setdefault(1 << (decoding.bit_length() - 1), [0, 0, 0, 0])
            for i, value in enumerate((steps, steps * decoding, draft_rows, emitted - steps * decoding)):
                pooled[i] += value
        return tuple(OccupancyClass(at_least, *pooled) for at_least, pooled in classes.items())
