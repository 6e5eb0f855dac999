"""The driver's view of its workers: what each has in hand, and what it has finished. Knows nothing of Ray."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.records import AcceptanceStats, PartReceipt, ShardTask, WorkerProgress
from pipeline.retries import Action


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A task that is with a worker since `began`."""

    task: ShardTask
    action: Action
    began: float

    @property
    def shard_index(self) -> int:
        return self.task.shard.index


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
    """The driver's view of one process: another one takes its place, and its index, when it ends.

    `handle` is None until it is started, which waits until `start_at` and happens at `started_at`. `starting`, `asked`
    and `locating` are answers that it owes: whether it is ready, how it is (asked for at `asked_at`), and which machine
    it is on. `delivered` counts what it has handed in. `has_given_back`: it returned a task undone, as one that drains
    does before its progress tells. `ended_by` is why the driver put an end to it.
    """

    index: int
    start_at: float = 0.0
    started_at: float = 0.0
    failed_starts: int = 0
    handle: Any = None
    is_ready: bool = False
    starting: Any = None
    locating: Any = None
    node: str | None = None
    flights: dict[Any, Flight] = field(default_factory=dict)
    asked: Any = None
    asked_at: float = 0.0
    progress: WorkerProgress | None = None
    delivered: Tally = Tally()
    has_given_back: bool = False
    ended_by: str = ""

    @property
    def is_placed(self) -> bool:
        return self.progress is not None

    @property
    def is_draining(self) -> bool:
        """It was told to end, and takes no more tasks."""
        return self.has_given_back or (self.progress is not None and self.progress.state == "draining")

    @property
    def takes_tasks(self) -> bool:
        return self.is_ready and not self.is_draining

    def refs(self) -> list[Any]:
        return [*self.flights, *(ref for ref in (self.starting, self.asked, self.locating) if ref is not None)]

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
