"""The driver's view of its workers: what each has in hand, and what it has finished. Knows nothing of Ray."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.records import AcceptanceStats, PartReceipt, WorkerProgress
from pipeline.retries import Action


@dataclass(frozen=True, slots=True)
class Flight:
    """A task that is with a worker."""

    shard_index: int
    action: Action


@dataclass(frozen=True, slots=True)
class Tally:
    """Output rows and tokens, counted."""

    rows: int = 0
    failed: int = 0
    tokens: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.rows + other.rows, self.failed + other.failed, self.tokens + other.tokens)

    def beyond(self, other: Tally) -> Tally:
        """What this counts more than `other`."""
        pairs = ((self.rows, other.rows), (self.failed, other.failed), (self.tokens, other.tokens))
        return Tally(*(max(mine - theirs, 0) for mine, theirs in pairs))


@dataclass(slots=True, eq=False)
class Worker:
    """The driver's view of one actor. `delivered` counts what it has handed in since its process started."""

    index: int
    handle: Any
    is_ready: bool = False
    starting: Any = None
    start_at: float = 0.0
    failed_starts: int = 0
    flights: dict[Any, Flight] = field(default_factory=dict)
    asked: Any = None
    progress: WorkerProgress | None = None
    delivered: Tally = Tally()

    def refs(self) -> list[Any]:
        return [*self.flights, *(ref for ref in (self.starting, self.asked) if ref is not None)]

    def died(self) -> None:
        self.is_ready, self.progress, self.delivered = False, None, Tally()

    def undelivered(self) -> Tally:
        """What it has finished but not handed in yet."""
        if self.progress is None:
            return Tally()
        seen = Tally(self.progress.rows_done, self.progress.rows_failed, self.progress.completion_tokens)
        return seen.beyond(self.delivered)

    def shown(self, *, is_draining: bool) -> WorkerProgress:
        if self.progress is None:
            return WorkerProgress(f"worker-{self.index}", "loading", 0, 0, 0, 0, 0, AcceptanceStats())
        return replace(self.progress, state="draining") if is_draining else self.progress


def tally_of(receipt: PartReceipt) -> Tally:
    return Tally(receipt.num_rows, receipt.num_failed, receipt.completion_tokens)
