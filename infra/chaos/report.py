"""The figures of a run, from its rounds."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.chaos.attempts import Lost, attempts_of, lost_attempts, read_events
from infra.chaos.compare import Comparison
from infra.chaos.disturbed import Outcome, Struck
from infra.chaos.targets import Target


@dataclass(frozen=True)
class Result:
    """A round that has ended."""

    target: Target
    outcome: Outcome
    comparison: Comparison

    @property
    def is_good(self) -> bool:
        return self.comparison.is_good and self.outcome.problem is None and not self.outcome.left_behind


def shard_of_rows(target: Target) -> Mapping[str, int]:
    import pyarrow.parquet as pq

    ids = pq.read_table(target.folder / "prompts.parquet", columns=["id"])["id"].to_pylist()
    return {uid: i // target.round.rows_per_shard for i, uid in enumerate(ids)}


def blame(target: Target, outcome: Outcome) -> None:
    """Count lost attempts for the fault that came before their repetition; those at a poisoned shard for its row."""
    shard_of = shard_of_rows(target)
    lines = target.events_file.read_text().splitlines()
    poisons = {
        shard_of[uid]: Struck(kind, 0.0, uid) for uid, kind in zip(target.poisoned, target.round.poisons, strict=True)
    }
    outcome.struck += poisons.values()
    for lost in lost_attempts(attempts_of(read_events(lines), shard_of)):
        cause = poisons.get(lost.shard) or _latest(outcome.struck, lost)
        if cause is None:
            outcome.redone_without_fault += lost.is_redone
        else:
            cause.sent_again += 1
            cause.redone += lost.is_redone


def _latest(struck: Sequence[Struck], lost: Lost) -> Struck | None:
    earlier = [fault for fault in struck if fault.at <= lost.again_at]
    return max(earlier, key=lambda fault: fault.at, default=None)


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """The last line of `make chaos`."""
    struck = [fault for result in results for fault in result.outcome.struck]
    recoveries = [fault.recovery_s for fault in struck if fault.recovery_s is not None]
    return {
        "rounds": len(results),
        "faults": dict(sorted(Counter(fault.kind for fault in struck).items())),
        "lost": sum(result.comparison.lost for result in results),
        "duplicated": sum(result.comparison.duplicated for result in results),
        "redone_shards": sum(fault.redone for fault in struck)
        + sum(result.outcome.redone_without_fault for result in results),
        "recovery_s": {
            "median": round(statistics.median(recoveries), 2) if recoveries else None,
            "max": round(max(recoveries), 2) if recoveries else None,
        },
    }


def table(results: Sequence[Result]) -> list[str]:
    """One line for each kind: how often, recovery, shards redone by one fault, shards sent to a worker again."""
    by_kind: dict[str, list[Struck]] = defaultdict(list)
    for result in results:
        for fault in result.outcome.struck:
            by_kind[fault.kind].append(fault)
    lines = [
        f"{'kind':22}{'faults':>7}{'recovery s: median':>20}{'max':>7}{'redone: all':>13}{'most':>6}{'sent again':>12}"
    ]
    for kind, faults in sorted(by_kind.items()):
        recoveries = [fault.recovery_s for fault in faults if fault.recovery_s is not None]
        median, most = (statistics.median(recoveries), max(recoveries)) if recoveries else (0.0, 0.0)
        redone = [fault.redone for fault in faults]
        sent = sum(fault.sent_again for fault in faults)
        lines.append(f"{kind:22}{len(faults):7}{median:20.1f}{most:7.1f}{sum(redone):13}{max(redone):6}{sent:12}")
    return lines
