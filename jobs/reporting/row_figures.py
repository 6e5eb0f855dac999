"""Figures of output rows, counted by Arrow over the parts: by column, lengths, latencies, examples of errors."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from jobs.reporting.stored_job import StoredJob
from pipeline.parallel import in_order
from pipeline.records import PartReceipt

MOST_VALUES = 200
"""A column with more different values than this is no grouping."""
SHOWN_VALUES = 24
EXAMPLES_PER_ERROR = 3
LENGTH_BINS = 24
LATENCY_PERCENTILES = (50, 90, 99, 100)
_SUMMED = ("num_steps", "num_draft_tokens", "num_accepted_draft_tokens", "completion_tokens")
_MEASURED = ("prompt_tokens", "completion_tokens", "latency_s", "finish_reason", *_SUMMED[:3])


@dataclass(slots=True)
class Group:
    """Rows that share a value of a column."""

    rows: int = 0
    failed: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0

    def add(self, counts: Sequence[int]) -> None:
        self.rows, self.failed = self.rows + counts[0], self.failed + counts[1]
        self.steps, self.drafted = self.steps + counts[2], self.drafted + counts[3]
        self.accepted, self.tokens = self.accepted + counts[4], self.tokens + counts[5]

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_window(self) -> float:
        return self.drafted / self.steps if self.steps else 0.0


@dataclass(slots=True)
class RowFigures:
    """What the parts hold. `groups` has for each column its values, by rows; `num_values` how many there were."""

    groups: dict[str, dict[str, Group]] = field(default_factory=dict)
    num_values: dict[str, int] = field(default_factory=dict)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: list[npt.NDArray[Any]] = field(default_factory=list)
    completion_tokens: list[npt.NDArray[Any]] = field(default_factory=list)
    latencies: list[npt.NDArray[Any]] = field(default_factory=list)
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))

    def latency_percentiles(self) -> dict[int, float]:
        values = _joined(self.latencies)
        return {p: float(np.percentile(values, p)) for p in LATENCY_PERCENTILES} if values.size else {}


def row_figures(job: StoredJob) -> RowFigures:
    """Reads the columns that it needs of all committed parts, several at once."""
    figures = RowFigures()
    columns = [name for name in (*job.copied, "sample_index", "finish_reason") if _groups(job, name)]
    groups: dict[str, dict[str, Group] | None] = {name: {} for name in columns}
    wanted = list(dict.fromkeys([*_MEASURED, "error_type", *columns]))
    for receipt, table in zip(job.receipts, in_order(lambda r: job.read(r, wanted), job.receipts), strict=True):
        _measure(figures, table)
        for name in columns:
            groups[name] = _grouped(groups[name], table, name)
        if receipt.num_failed:
            _note_errors(figures, job, receipt)
    if (endings := groups.get("finish_reason")) is not None:
        endings.pop("error", None)
    for name, values in groups.items():
        if values is not None and (len(values) > 1 or name in job.copied):
            by_rows = sorted(values.items(), key=lambda item: (-item[1].rows, item[0]))
            figures.num_values[name] = len(values)
            figures.groups[name] = dict(sorted(by_rows[:SHOWN_VALUES]))
    return figures


def histogram(arrays: Sequence[npt.NDArray[Any]]) -> dict[str, Any]:
    """Counts of whole numbers in bins of equal, round width: `start` of the first, `width`, `counts`, and percentiles.

    Worked example: 1, 2, 12 in bins of 5 (had there to be few): start 0, width 5, counts 2 0 1.
    """
    values = _joined(arrays)
    if not values.size:
        return {"start": 0, "width": 1, "counts": [], "p50": 0, "p99": 0, "max": 0}
    low, high = int(values.min()), int(values.max())
    width = _round_up((high - low + 1) / LENGTH_BINS)
    start = low // width * width
    counts = np.bincount((values - start) // width).tolist()
    p50, p99 = (float(np.percentile(values, p)) for p in (50, 99))
    return {"start": start, "width": width, "counts": counts, "p50": p50, "p99": p99, "max": high}


def _round_up(width: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50 .."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= width:
                return factor * power
        power *= 10


def _joined(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)


def _groups(job: StoredJob, name: str) -> bool:
    return name in job.columns and (name != "sample_index" or job.config.sampling.n > 1)


def _measure(figures: RowFigures, table: pa.Table) -> None:
    for value in pc.value_counts(table["finish_reason"]).to_pylist():
        figures.finish_reasons[value["values"]] += value["counts"]
    good = table.filter(pc.not_equal(table["finish_reason"], "error"))
    figures.prompt_tokens.append(good["prompt_tokens"].to_numpy().astype(np.int64))
    figures.completion_tokens.append(good["completion_tokens"].to_numpy().astype(np.int64))
    figures.latencies.append(good["latency_s"].to_numpy())


def _grouped(groups: dict[str, Group] | None, table: pa.Table, name: str) -> dict[str, Group] | None:
    """With the rows of one more part; None once the column turned out to be no grouping."""
    kind = table.schema.field(name).type
    if groups is None or not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or _is_plain(kind)):
        return None
    counted = table.select([*_SUMMED]).append_column("value", pc.cast(table[name], pa.string()))
    failed = pc.cast(pc.equal(table["finish_reason"], "error"), pa.int64())
    sums = (
        counted.append_column("failed", failed)
        .group_by("value")
        .aggregate([([], "count_all"), ("failed", "sum"), *((column, "sum") for column in _SUMMED)])
    )
    for row in sums.to_pylist():
        value = "(null)" if row["value"] is None else row["value"]
        counts = (row["count_all"], row["failed_sum"], *(row[f"{column}_sum"] for column in _SUMMED))
        groups.setdefault(value, Group()).add(counts)
    return groups if len(groups) <= MOST_VALUES else None


def _is_plain(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_dictionary(kind))


def _note_errors(figures: RowFigures, job: StoredJob, receipt: PartReceipt) -> None:
    """A few rows of each kind of error; parts are only read for kinds of which there are none yet."""
    lacking = {kind for kind in receipt.errors if len(figures.examples[kind]) < EXAMPLES_PER_ERROR}
    if not lacking:
        return
    table = job.read(receipt, ["id", "error_type", "error"])
    for row in table.filter(pc.is_valid(table["error_type"])).to_pylist():
        found = figures.examples[row["error_type"]]
        if len(found) < EXAMPLES_PER_ERROR:
            found.append({"id": row["id"], "error": row["error"]})
