"""What the driver publishes of a job: once a second where its shards and workers are, and each shard as it comes in."""

from __future__ import annotations

from collections import Counter
from typing import get_args

from pipeline import metrics
from pipeline.metrics import MetricSink
from pipeline.records import PartReceipt, Progress, WorkerState


class JobMetrics:
    def __init__(self, sink: MetricSink) -> None:
        self._sink = sink
        self._restarts = 0
        self._retries = 0

    def publish(self, progress: Progress, waiting: int, restarts: int, retries: int) -> None:
        """`waiting` shards are with no worker; `restarts` and `retries` count since the start."""
        running = progress.shards_total - progress.shards_committed - waiting
        states = {"waiting": waiting, "running": running, "committed": progress.shards_committed}
        for state, count in states.items():
            self._sink.set(metrics.SHARDS, count, state=state)
        workers = Counter(worker.state for worker in progress.workers)
        for worker_state in get_args(WorkerState):
            self._sink.set(metrics.WORKERS, workers[worker_state], state=worker_state)
        self._sink.add(metrics.RESTARTS, restarts - self._restarts)
        self._sink.add(metrics.RETRIES, retries - self._retries)
        self._restarts, self._retries = restarts, retries

    def committed(self, receipt: PartReceipt) -> None:
        self._sink.add(metrics.SAMPLES, receipt.num_rows)
        for error_type, count in receipt.errors.items():
            self._sink.add(metrics.ERRORS, count, error_type=error_type)
