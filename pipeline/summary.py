"""Figures of a job, pooled from counts: of a run, of what storage holds, and by the values of a column."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

from pipeline import storage
from pipeline.commits import JobState, JobStore
from pipeline.config import JobConfig
from pipeline.errors import ConfigError
from pipeline.parts import read_part_rows
from pipeline.records import AcceptanceStats, PartReceipt
from pipeline.schema import STATS_COLUMNS, output_schema, stats_of
from pipeline.shards import Plan


@dataclass(frozen=True, slots=True)
class JobSummary:
    """How far a job is and what it gave. Rows are output rows (samples); `errors` counts them by type."""

    state: JobState
    shards_total: int
    shards_committed: int
    rows_total: int
    rows_ok: int
    rows_failed: int
    prompt_tokens: int
    completion_tokens: int
    worker_seconds: float
    stats: AcceptanceStats
    errors: dict[str, int]
    num_looping: int = 0
    num_cut_off: int = 0

    def to_json(self) -> dict[str, Any]:
        """The fixed form of `status --json`."""
        return {
            "state": self.state,
            "shards": {"total": self.shards_total, "committed": self.shards_committed},
            "rows": {"total": self.rows_total, "ok": self.rows_ok, "failed": self.rows_failed},
            **_rates(self.stats),
        }

    def metrics(self) -> dict[str, Any]:
        """The content of `metrics.json`: the fixed form and everything that it leaves out."""
        return {
            **self.to_json(),
            "prompt_tokens": self.prompt_tokens,
            "worker_seconds": self.worker_seconds,
            "errors": self.errors,
            "num_looping": self.num_looping,
            "num_cut_off": self.num_cut_off,
            "num_draft_tokens": self.stats.num_draft_tokens,
            "num_accepted_draft_tokens": self.stats.num_accepted_draft_tokens,
            "draft_acceptance_rate": self.stats.draft_acceptance_rate,
            "mean_window": self.stats.mean_window,
            "acceptance_histogram": list(self.stats.acceptance_histogram),
            "window_histogram": list(self.stats.window_histogram),
            "accepted_by_drafter": dict(self.stats.accepted_by_drafter),
        }


@dataclass(slots=True)
class Figures:
    """Pooled figures of a group of output rows."""

    rows: int = 0
    failed: int = 0
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)

    @property
    def completion_tokens(self) -> int:
        return self.stats.completion_tokens

    def to_json(self) -> dict[str, Any]:
        return {"rows": self.rows, "failed": self.failed, **_rates(self.stats)}


def summarise(receipts: Iterable[PartReceipt], plan: Plan | None, config: JobConfig, state: JobState) -> JobSummary:
    """Pool the receipts of committed shards. Without a plan (a job that is just being made) the totals are 0."""
    receipts = list(receipts)
    failed = sum(receipt.num_failed for receipt in receipts)
    return JobSummary(
        state=state,
        shards_total=0 if plan is None else len(plan.shards),
        shards_committed=len(receipts),
        rows_total=0 if plan is None else plan.num_rows * config.sampling.n,
        rows_ok=sum(receipt.num_rows for receipt in receipts) - failed,
        rows_failed=failed,
        prompt_tokens=sum(receipt.prompt_tokens for receipt in receipts),
        completion_tokens=sum(receipt.completion_tokens for receipt in receipts),
        worker_seconds=sum(receipt.seconds for receipt in receipts),
        stats=reduce(add, (receipt.stats for receipt in receipts), AcceptanceStats()),
        errors=dict(sum((Counter(receipt.errors) for receipt in receipts), Counter())),
        num_looping=sum(receipt.num_looping for receipt in receipts),
        num_cut_off=sum(receipt.num_cut_off for receipt in receipts),
    )


def status_of(output: str) -> JobSummary:
    """The state of a job, from its storage alone. Raises ConfigError where there is no job."""
    store = JobStore(output)
    state = store.state()
    return summarise(store.committed().values(), store.load_plan(), store.load_config(), state)


def acceptance_by(output: str, column: str) -> dict[str, Figures]:
    """Figures by the values (as text) of an output column, over the committed parts, in order of appearance.

    The parts are streamed. Raises ConfigError where there is no job or no such column.
    """
    store = JobStore(output)
    config, plan = store.load_config(), store.load_plan()
    known = [] if plan is None else output_schema(config, plan.passthrough).names
    if column not in known:
        raise ConfigError(f"the column must be one of the output, got {column!r} (its columns: {', '.join(known)})")
    groups: dict[str, Figures] = {}
    columns = list(dict.fromkeys([column, "finish_reason", *STATS_COLUMNS]))
    for receipt in store.committed().values():
        for row in read_part_rows(storage.join(output, receipt.path), columns):
            group = groups.setdefault(str(row[column]), Figures())
            group.rows += 1
            group.failed += row["finish_reason"] == "error"
            group.stats += stats_of(row)
    return groups


def _rates(stats: AcceptanceStats) -> dict[str, Any]:
    return {
        "completion_tokens": stats.completion_tokens,
        "num_steps": stats.num_steps,
        "tokens_per_step": stats.completion_tokens / stats.num_steps if stats.num_steps else 0.0,
        "mean_acceptance_length": stats.mean_acceptance_length,
    }
