"""Which shard goes next, and which one takes too long: bookkeeping that knows nothing of Ray or of workers."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.records import Shard

STRAGGLER_FACTOR = 2.0
"""A shard that takes so many times what its rows take elsewhere is a straggler."""
STRAGGLER_MIN_S = 10.0
"""Below this a second attempt would end no sooner than the first."""
_FEWEST_PACES = 3
_PACES_KEPT = 101


@dataclass(frozen=True, slots=True)
class _Again:
    """A shard that was with a worker before; `needs_own_worker`: it may have ended it."""

    index: int
    not_before: float
    needs_own_worker: bool


class ShardQueue:
    """Shards that wait for a worker: those that have been tried before, then the longest expected.

    With long shards first and short ones last, workers end at about the same time. Rows decide what is long, for a row
    costs up to `max_tokens` steps; bytes of input decide among as many rows.
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
        ordered = sorted(shards, key=lambda shard: (shard.num_rows, shard.num_bytes, -shard.index))
        self._fresh = [shard.index for shard in ordered]
        self._again: list[_Again] = []

    def __len__(self) -> int:
        return len(self._fresh) + len(self._again)

    def put_back(self, index: int, not_before: float, needs_own_worker: bool) -> None:
        self._again.append(_Again(index, not_before, needs_own_worker))

    def take(self, now: float, is_busy: bool) -> int | None:
        """The next shard for a worker that has others in hand (`is_busy`) or none.

        A busy worker gets none while a shard waits for one of its own: the first that runs dry takes that.
        """
        for entry in self._again:
            if entry.not_before <= now:
                if entry.needs_own_worker and is_busy:
                    return None
                self._again.remove(entry)
                return entry.index
        return self._fresh.pop() if self._fresh else None


class Pace:
    """How long rows take, learnt from the shards that came back."""

    def __init__(self) -> None:
        self._seconds_per_row: deque[float] = deque(maxlen=_PACES_KEPT)

    def learn(self, num_rows: int, seconds: float) -> None:
        self._seconds_per_row.append(seconds / num_rows)

    def is_straggling(self, num_rows: int, seconds: float) -> bool:
        """Whether a shard has been away for much longer than the median of the others suggests."""
        if len(self._seconds_per_row) < _FEWEST_PACES or seconds < STRAGGLER_MIN_S:
            return False
        return seconds > STRAGGLER_FACTOR * num_rows * statistics.median(self._seconds_per_row)
