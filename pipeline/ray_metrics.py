"""Publishes metrics of this process through Ray, which serves them on every node in the format of Prometheus.

Ray's core takes a value in some 2 microseconds and sends what it has on every few seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ray.util.metrics import Counter, Gauge, Histogram

from pipeline.metrics import STEP_TIME_BOUNDARIES_S, Metric


class RayMetrics:
    """A `MetricSink` for the metrics of one process; `labels` are the same for all their values."""

    def __init__(self, metrics: Iterable[Metric], labels: Mapping[str, str]) -> None:
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in metrics:
            name, text, keys = metric.name, metric.description, metric.all_labels
            if metric.kind == "counter":
                self._counters[name] = Counter(name, text, keys)
            elif metric.kind == "gauge":
                self._gauges[name] = Gauge(name, text, keys)
            else:
                self._histograms[name] = Histogram(name, text, list(STEP_TIME_BOUNDARIES_S), keys)
        for made in (*self._counters.values(), *self._gauges.values(), *self._histograms.values()):
            made.set_default_tags(dict(labels))

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        self._gauges[metric.name].set(value, labels)

    def add(self, metric: Metric, amount: float, **labels: str) -> None:
        if amount > 0:  # Ray takes nothing else
            self._counters[metric.name].inc(amount, labels)

    def observe(self, metric: Metric, values: Iterable[float]) -> None:
        for value in values:
            self._histograms[metric.name].observe(value)
