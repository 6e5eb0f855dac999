"""What a worker publishes is what its engine has counted, whenever it is asked and however often."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from pipeline import metrics
from pipeline.config import EngineConfig, ModelConfig, SamplingConfig
from pipeline.decoding_config import AutoConfig
from pipeline.metrics import WORKER_METRICS, Metric
from workers.engine import Engine, Request
from workers.engine_thread import EngineThread
from workers.model_loading import load_model
from workers.worker_metrics import WorkerMetrics, at_least


class Sink:
    """Totals of counters, last values of gauges, numbers of observations."""

    def __init__(self) -> None:
        self.totals: dict[Metric, dict[str, float]] = {}
        self.published: set[Metric] = set()

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        self._of(metric)[""] = value

    def add(self, metric: Metric, amount: float, **labels: str) -> None:
        assert amount >= 0
        values, label = self._of(metric), labels.get("position", "")
        values[label] = values.get(label, 0) + amount

    def observe(self, metric: Metric, values: Iterable[float]) -> None:
        seen = self._of(metric)
        seen[""] = seen.get("", 0) + len(list(values))

    def _of(self, metric: Metric) -> dict[str, float]:
        return self.totals.setdefault(metric, {})


def test_metrics_add_up_to_the_engine_s_counts(tiny_model_dir: Callable[[str], Path]) -> None:
    loaded = load_model(ModelConfig(id=str(tiny_model_dir("llama")), dtype="float32", device="cpu"))
    sampling = SamplingConfig(max_tokens=40, temperature=0.0, ignore_eos=True)
    engine = EngineThread(
        lambda halvings: Engine(loaded, EngineConfig(max_sequences=2), AutoConfig(), halvings=halvings)
    )
    sink = Sink()
    worker = WorkerMetrics(sink)
    worker.publish(engine)
    futures = [engine.submit(Request(f"r{i}", tuple(range(10, 20)), sampling)) for i in range(6)]
    for future in futures:
        future.result(timeout=60)
        worker.publish(engine)
    worker.publish(engine)
    stats = engine.counters.stats
    totals = {metric: values.get("", 0) for metric, values in sink.totals.items()}
    assert set(totals) == set(WORKER_METRICS)
    assert totals[metrics.PROMPT_TOKENS] == 60
    assert totals[metrics.GENERATION_TOKENS] == stats.completion_tokens == 240
    assert 0 < totals[metrics.DRAFTS] == stats.num_steps - stats.window_histogram[0]
    assert totals[metrics.DRAFT_TOKENS] == stats.num_draft_tokens
    assert 0 < totals[metrics.ACCEPTED_TOKENS] == stats.num_accepted_draft_tokens
    by_position = sink.totals[metrics.ACCEPTED_PER_POSITION]
    assert sum(by_position.values()) == stats.num_accepted_draft_tokens
    assert by_position["0"] == stats.num_steps - stats.acceptance_histogram[0]
    assert 40 / 5 < totals[metrics.STEP_TIME] <= 240
    assert totals[metrics.RUNNING] == totals[metrics.WAITING] == totals[metrics.STALLED] == 0
    assert 0 <= totals[metrics.KV_USAGE] < 0.01
    engine.close()


def test_steps_that_accepted_at_least_so_many() -> None:
    assert at_least((5, 3, 2)) == [5, 2]
    assert at_least((5,)) == at_least(()) == []
