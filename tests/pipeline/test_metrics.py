"""Names and values of the metrics; docs/metrics.md lists every one of them and no other."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from pipeline.job_metrics import JobMetrics
from pipeline.metrics import DRIVER_METRICS, WORKER_METRICS, Metric
from pipeline.records import AcceptanceStats, PartReceipt, Progress, WorkerProgress

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


class Values:
    """A sink that keeps the last or the total value under name and labels, and refuses labels that are not told of."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], float] = {}

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        self.values[self._key(metric, "gauge", labels)] = value

    def add(self, metric: Metric, amount: float, **labels: str) -> None:
        assert amount >= 0
        key = self._key(metric, "counter", labels)
        self.values[key] = self.values.get(key, 0) + amount

    def observe(self, metric: Metric, values: Iterable[float]) -> None:
        key = self._key(metric, "histogram", {})
        self.values[key] = self.values.get(key, 0) + len(list(values))

    def _key(self, metric: Metric, kind: str, labels: dict[str, str]) -> tuple[str, ...]:
        assert metric.kind == kind
        assert tuple(labels) == metric.labels
        return (metric.name.removeprefix("sevenleague_"), *labels.values())


def test_the_document_is_the_table() -> None:
    rows = re.findall(r"^\| `(ray_\w+)` \| (\w+) \| (\w+) \| (.+) \| (.+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert rows == [
        (m.exported_name, m.kind, m.unit, ", ".join(f"`{label}`" for label in m.all_labels), m.description)
        for m in (*WORKER_METRICS, *DRIVER_METRICS)
    ]
    assert len({row[0] for row in rows}) == len(rows)


def worker(state: str) -> WorkerProgress:
    return WorkerProgress("worker-0", state, 0, 0, 0, 0, 0, AcceptanceStats())  # type: ignore[arg-type]


def test_a_job_in_numbers() -> None:
    sink = Values()
    metrics = JobMetrics(sink)
    workers = (worker("running"), worker("running"), worker("loading"))
    metrics.publish(Progress(0, 0, 80, 3, 10, 0, workers, 1.0), waiting=5, restarts=0, retries=1)
    metrics.publish(Progress(0, 0, 80, 4, 10, 0, workers[:2], 2.0), waiting=4, restarts=2, retries=1)
    errors = {"prompt_too_long": 2, "empty_prompt": 1}
    metrics.committed(PartReceipt(0, 1, "data/x", 8, 3, 100, 5, 0, AcceptanceStats(), errors, 1.0, "worker-0"))
    metrics.committed(PartReceipt(1, 1, "data/y", 8, 1, 100, 5, 0, AcceptanceStats(), {"empty_prompt": 1}, 1.0, "w"))
    assert sink.values == {
        ("num_shards", "waiting"): 4,
        ("num_shards", "running"): 2,
        ("num_shards", "committed"): 4,
        ("num_workers", "loading"): 0,
        ("num_workers", "running"): 2,
        ("num_workers", "idle"): 0,
        ("num_workers", "draining"): 0,
        ("worker_restarts",): 2,
        ("shard_retries",): 1,
        ("samples",): 16,
        ("sample_errors", "prompt_too_long"): 2,
        ("sample_errors", "empty_prompt"): 2,
    }
