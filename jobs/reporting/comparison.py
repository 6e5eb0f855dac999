"""Two outputs side by side: their figures, their settings, and the samples that both have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jobs.reporting.cost import Cost
from jobs.reporting.row_figures import RowFigures
from jobs.reporting.samples import LONGEST_TEXT, Samples, find_generations, keys_of
from jobs.reporting.stored_job import StoredJob


@dataclass(frozen=True, slots=True)
class Line:
    """A figure of this job and of the other one; `change` is their ratio, None where it says nothing."""

    name: str
    mine: float
    other: float
    form: str = "{:,.0f}"

    @property
    def change(self) -> float | None:
        return self.mine / self.other if self.other else None

    def shown(self, value: float) -> str:
        return self.form.format(value).replace("%", " %")


def compared_figures(job: StoredJob, other: StoredJob, mine: Cost, others: Cost) -> list[Line]:
    a, b = job.summary, other.summary
    return [
        Line("rows", a.rows_ok + a.rows_failed, b.rows_ok + b.rows_failed),
        Line("failed rows", a.rows_failed, b.rows_failed),
        Line("new tokens", a.completion_tokens, b.completion_tokens),
        Line("tokens per second", mine.tokens_per_s, others.tokens_per_s, "{:,.1f}"),
        Line("tokens per step", a.stats.mean_acceptance_length, b.stats.mean_acceptance_length, "{:.3f}"),
        Line("drafts accepted", a.stats.draft_acceptance_rate, b.stats.draft_acceptance_rate, "{:.1%}"),
        Line("mean window", a.stats.mean_window, b.stats.mean_window, "{:.2f}"),
        Line(f"{mine.unit}-hours", mine.hours, others.hours, "{:,.4f}"),
    ]


def compared_groups(mine: RowFigures, other: RowFigures) -> dict[str, list[Line]]:
    """Tokens per step by the values that a column has in both outputs."""
    lines = {
        column: [
            Line(value, group.tokens_per_step, other.groups[column][value].tokens_per_step, "{:.3f}")
            for value, group in groups.items()
            if value in other.groups[column]
        ]
        for column, groups in mine.groups.items()
        if column in other.groups and column != "finish_reason"
    }
    return {column: found for column, found in lines.items() if found}


def differing_settings(job: StoredJob, other: StoredJob) -> list[tuple[str, Any, Any]]:
    """Dotted keys of the two configurations whose values differ."""
    a, b = _flat(job.config.model_dump(mode="json")), _flat(other.config.model_dump(mode="json"))
    return [(key, a.get(key, "absent"), b.get(key, "absent")) for key in {**a, **b} if a.get(key) != b.get(key)]


def compare_samples(samples: Samples, other: StoredJob) -> Counter[str]:
    """Adds to each row `against` (same, differs, missing) and, where it differs, what the other job generated."""
    found = find_generations(other, set(keys_of(samples.rows)))
    verdicts: Counter[str] = Counter()
    for row, key in zip(samples.rows, keys_of(samples.rows), strict=True):
        theirs = found.get(key)
        if theirs is None:
            row["against"] = "missing"
        elif hash(theirs["generation"]) == row["whole"]:
            row["against"] = "same"
        else:
            row |= {"against": "differs", "other": (theirs["generation"] or "")[: LONGEST_TEXT + 1]}
        verdicts[row["against"]] += 1
    return verdicts


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat
