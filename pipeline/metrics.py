"""The metrics of a running job by name, and their values: pure data, known without Ray (see `ray_metrics`).

Names that vLLM has too mean what they mean there, with `sevenleague_` for `vllm:`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

STEP_TIME_BOUNDARIES_S = tuple(0.0005 * 2**i for i in range(17))
"""0.5 ms to 33 s, each bound twice the one before."""


@dataclass(frozen=True, slots=True)
class Metric:
    """What is published under one name. `labels` are those besides `output`, and `worker` where a worker publishes."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    by: Literal["worker", "driver"]
    description: str
    labels: tuple[str, ...] = ()

    @property
    def all_labels(self) -> tuple[str, ...]:
        return (*(("output", "worker") if self.by == "worker" else ("output",)), *self.labels)

    @property
    def exported_name(self) -> str:
        """The name that Prometheus sees: Ray adds a prefix, and to counters a suffix."""
        return f"ray_{self.name}" + ("_total" if self.kind == "counter" else "")


class MetricSink(Protocol):
    """Where values go; `labels` are those that differ from value to value."""

    def set(self, metric: Metric, value: float, **labels: str) -> None: ...

    def add(self, metric: Metric, amount: float, **labels: str) -> None:
        """Nothing happens for 0."""

    def observe(self, metric: Metric, values: Iterable[float]) -> None: ...


RUNNING = Metric("sevenleague_num_requests_running", "gauge", "samples", "worker", "samples in the batch")
WAITING = Metric("sevenleague_num_requests_waiting", "gauge", "samples", "worker", "samples that wait for a place")
KV_USAGE = Metric(
    "sevenleague_kv_cache_usage_perc", "gauge", "fraction", "worker", "part of the KV budget in use, 0 to 1"
)
STALLED = Metric(
    "sevenleague_stalled_seconds", "gauge", "s", "worker", "time since the last step while there is work, else 0"
)
PROMPT_TOKENS = Metric("sevenleague_prompt_tokens", "counter", "tokens", "worker", "prompt tokens of finished requests")
GENERATION_TOKENS = Metric(
    "sevenleague_generation_tokens", "counter", "tokens", "worker", "new tokens of finished requests"
)
DRAFTS = Metric(
    "sevenleague_spec_decode_num_drafts", "counter", "drafts", "worker", "steps of a sequence that had a draft"
)
DRAFT_TOKENS = Metric(
    "sevenleague_spec_decode_num_draft_tokens", "counter", "tokens", "worker", "tokens that were drafted"
)
ACCEPTED_TOKENS = Metric(
    "sevenleague_spec_decode_num_accepted_tokens", "counter", "tokens", "worker", "drafted tokens that were accepted"
)
ACCEPTED_PER_POSITION = Metric(
    "sevenleague_spec_decode_num_accepted_tokens_per_pos",
    "counter",
    "tokens",
    "worker",
    "accepted tokens by their place in the accepted path, from 0",
    ("position",),
)
WINDOW = Metric(
    "sevenleague_draft_window",
    "gauge",
    "tokens",
    "worker",
    "mean number of drafted tokens in a step of a sequence, over the requests that finished since the last update",
)
STEP_TIME = Metric(
    "sevenleague_step_time_seconds", "histogram", "s", "worker", "time of a step of the engine, drafting included"
)
PREEMPTIONS = Metric(
    "sevenleague_num_preemptions", "counter", "samples", "worker", "samples that were sent back to the queue for memory"
)
MEMORY_HALVINGS = Metric(
    "sevenleague_out_of_memory", "counter", "events", "worker", "times that the device's memory ran out in a step"
)
SHARDS = Metric(
    "sevenleague_num_shards", "gauge", "shards", "driver", "shards that are waiting, running or committed", ("state",)
)
WORKERS = Metric(
    "sevenleague_num_workers",
    "gauge",
    "workers",
    "driver",
    "workers that are loading, running, idle or draining",
    ("state",),
)
RESTARTS = Metric(
    "sevenleague_worker_restarts", "counter", "workers", "driver", "processes of workers that ended and were replaced"
)
RETRIES = Metric(
    "sevenleague_shard_retries", "counter", "attempts", "driver", "attempts at a shard that ended without a part"
)
SAMPLES = Metric("sevenleague_samples", "counter", "samples", "driver", "samples of committed shards")
ERRORS = Metric(
    "sevenleague_sample_errors",
    "counter",
    "samples",
    "driver",
    "samples of committed shards that are error rows",
    ("error_type",),
)

WORKER_METRICS = (
    RUNNING,
    WAITING,
    KV_USAGE,
    STALLED,
    PROMPT_TOKENS,
    GENERATION_TOKENS,
    DRAFTS,
    DRAFT_TOKENS,
    ACCEPTED_TOKENS,
    ACCEPTED_PER_POSITION,
    WINDOW,
    STEP_TIME,
    PREEMPTIONS,
    MEMORY_HALVINGS,
)
DRIVER_METRICS = (
    SHARDS,
    WORKERS,
    RESTARTS,
    RETRIES,
    SAMPLES,
    ERRORS,
)
