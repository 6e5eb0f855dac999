"""What a job took: machine time from its receipts, and money where a price is given."""

from __future__ import annotations

from dataclasses import dataclass

from jobs.reporting.clock import make_clock
from jobs.reporting.stored_job import StoredJob
from pipeline.records import PartReceipt


@dataclass(frozen=True, slots=True)
class Cost:
    """`busy_s` is the time in which any attempt was at work, `hours` counts `unit`s: GPUs, or workers without GPUs.

    A worker's time runs from the start of its process, the loading of the model included, to its last receipt. What a
    process took that never delivered a part is not known to storage.
    """

    unit: str
    busy_s: float
    hours: float
    tokens: int
    price: float | None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.busy_s if self.busy_s else 0.0

    @property
    def tokens_per_unit_second(self) -> float:
        return self.tokens / (self.hours * 3600) if self.hours else 0.0

    @property
    def total(self) -> float | None:
        return None if self.price is None else self.price * self.hours

    @property
    def per_million_tokens(self) -> float | None:
        return None if self.total is None or not self.tokens else self.total / self.tokens * 1e6


def cost_of(job: StoredJob, price: float | None) -> Cost:
    receipts = job.timed_receipts
    gpus = job.config.cluster.gpus_per_replica
    return Cost(
        unit="GPU" if gpus else "worker",
        busy_s=make_clock(receipts).total_s,
        hours=_worker_seconds(receipts) * (gpus or 1) / 3600,
        tokens=sum(receipt.completion_tokens for receipt in receipts),
        price=price,
    )


def _worker_seconds(receipts: list[PartReceipt]) -> float:
    """Of all processes. Two of one worker never ran at the same time."""
    lives: dict[tuple[str, float], tuple[float, float]] = {}
    for receipt in receipts:
        began = receipt.worker_began or receipt.began
        start, end = lives.get((receipt.worker, receipt.worker_began), (began, began))
        lives[receipt.worker, receipt.worker_began] = min(start, began), max(end, receipt.began + receipt.seconds)
    return sum(end - start for start, end in lives.values())
