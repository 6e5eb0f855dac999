"""What a worker publishes, about once a second and whenever a shard is done: never in a step of the engine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate, zip_longest

from pipeline import metrics
from pipeline.metrics import Metric, MetricSink
from pipeline.records import AcceptanceStats
from workers.engine_thread import EngineThread


class WorkerMetrics:
    """Publishes the counters of an engine, of which it remembers what it has published. Any thread may call it."""

    def __init__(self, sink: MetricSink) -> None:
        self._sink = sink
        self._lock = threading.Lock()
        self._stats = AcceptanceStats()
        self._counted: dict[Metric, int] = {}

    def publish(self, engine: EngineThread) -> None:
        with self._lock:
            now, sink = engine.counters, self._sink
            sink.set(metrics.RUNNING, now.running)
            sink.set(metrics.WAITING, now.waiting)
            sink.set(metrics.KV_USAGE, now.kv_usage)
            sink.set(metrics.STALLED, now.stalled_s)
            sink.observe(metrics.STEP_TIME, engine.take_step_seconds())
            self._count(metrics.PROMPT_TOKENS, now.prompt_tokens)
            self._count(metrics.PREEMPTIONS, now.preemptions)
            self._count(metrics.MEMORY_HALVINGS, now.memory_halvings)
            if now.stats is not self._stats:
                self._publish_stats(self._stats, now.stats)
                self._stats = now.stats

    def _count(self, metric: Metric, total: int) -> None:
        """A total may seem to fall for a moment, while an engine takes the place of another."""
        before = self._counted.get(metric, 0)
        self._counted[metric] = max(before, total)
        self._sink.add(metric, self._counted[metric] - before)

    def _publish_stats(self, before: AcceptanceStats, now: AcceptanceStats) -> None:
        steps = now.num_steps - before.num_steps
        drafted = now.num_draft_tokens - before.num_draft_tokens
        without_draft = sum(now.window_histogram[:1]) - sum(before.window_histogram[:1])
        self._sink.add(metrics.GENERATION_TOKENS, now.completion_tokens - before.completion_tokens)
        self._sink.add(metrics.DRAFTS, steps - without_draft)
        self._sink.add(metrics.DRAFT_TOKENS, drafted)
        self._sink.add(metrics.ACCEPTED_TOKENS, now.num_accepted_draft_tokens - before.num_accepted_draft_tokens)
        places = zip_longest(at_least(now.acceptance_histogram), at_least(before.acceptance_histogram), fillvalue=0)
        for position, (steps_now, steps_before) in enumerate(places):
            self._sink.add(metrics.ACCEPTED_PER_POSITION, steps_now - steps_before, position=str(position))
        if steps:
            self._sink.set(metrics.WINDOW, drafted / steps)


def at_least(histogram: Sequence[int]) -> list[int]:
    """Steps that accepted more than i tokens, for i = 0, 1, ..: `(5, 3, 2)` gives `[5, 2]`."""
    return list(accumulate(reversed(histogram[1:])))[::-1]
