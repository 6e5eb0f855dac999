"""One job on a real Ray: its metrics as Prometheus reads them over HTTP, and its log as lines of JSON with traces."""

from __future__ import annotations

import json
import logging
import re
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from subprocess import CompletedProcess
from typing import Any

import pytest

from pipeline.metrics import DRIVER_METRICS, WORKER_METRICS
from tests.jobs.conftest import Job

Sample = tuple[dict[str, str], float]
"""Labels and value."""


@pytest.fixture
def ray_node() -> Iterator[dict[str, Any]]:
    """The node of a Ray of this test's own that passes metrics on without delay."""
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=80 * 2**20,
        include_dashboard=False,
        logging_level=logging.ERROR,
        _system_config={"metrics_report_interval_ms": 200},
    )
    yield ray.nodes()[0]
    ray.shutdown()


def scrape(node: dict[str, Any]) -> dict[str, list[Sample]]:
    url = f"http://127.0.0.1:{node['MetricsExportPort']}/metrics"
    text = urllib.request.urlopen(url, timeout=10).read().decode()
    found: dict[str, list[Sample]] = defaultdict(list)
    for name, labels, value in re.findall(r"^(ray_sevenleague_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        found[name].append((dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)))
    return found


def value(found: dict[str, list[Sample]], name: str, **labels: str) -> float:
    (one,) = [number for pairs, number in found[f"ray_sevenleague_{name}"] if labels.items() <= pairs.items()]
    return one


@pytest.mark.ray
def test_metrics_are_scraped_and_every_line_of_the_log_is_json(
    ray_node: dict[str, Any], make_job: Callable[..., Job], run_cli: Callable[..., CompletedProcess[str]]
) -> None:
    import ray

    prompts = ["once upon a time", "", "the quick brown fox", "a b a b a b a b"] * 4
    job = make_job(
        prompts,
        sampling={"max_tokens": 200, "ignore_eos": True, "temperature": 0.0},
        cluster={"address": ray.get_runtime_context().gcs_address},
    )
    done = run_cli("run", job.file, "--log-format", "json")
    assert done.returncode == 3, done.stderr
    _check_metrics(scrape(ray_node), str(job.output))
    _check_log([json.loads(line) for line in done.stderr.splitlines()])


def _check_metrics(found: dict[str, list[Sample]], output: str) -> None:
    """What happened in the last moments may be missing: a process that is killed passes nothing on."""
    never = {"num_preemptions", "out_of_memory", "worker_restarts", "shard_retries"}
    for metric in (*WORKER_METRICS, *DRIVER_METRICS):
        samples = found[metric.exported_name + ("_count" if metric.kind == "histogram" else "")]
        if metric.name.removeprefix("sevenleague_") in never:
            assert not samples, metric
        else:
            assert samples, metric
        for labels, _ in samples:
            assert labels.keys() >= set(metric.all_labels), metric
            assert labels["output"] == output
    assert 0 < value(found, "generation_tokens_total", worker="worker-0") <= 12 * 200
    steps = value(found, "generation_tokens_total") - value(found, "spec_decode_num_accepted_tokens_total")
    assert value(found, "spec_decode_num_accepted_tokens_per_pos_total", position="0") <= steps
    assert 200 / 9 < value(found, "step_time_seconds_count") <= 12 * 200
    assert value(found, "num_shards", state="committed") + value(found, "num_shards", state="running") > 0
    assert 0 < value(found, "samples_total") <= 16
    assert 0 < value(found, "sample_errors_total", error_type="empty_prompt") <= 4


def _check_log(lines: list[dict[str, Any]]) -> None:
    records = [line for line in lines if "event" not in line]
    assert len(records) < len(lines)
    by_trace: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for record in records:
        assert record.keys() >= {"time", "level", "logger", "trace", "message"}
        if record["trace"] is not None:
            by_trace[record["trace"]].append((record["logger"], record["message"]))
    run_ids = {re.fullmatch(r"0000[0-3]-([0-9a-f]{8})-1", trace)[1] for trace in by_trace}  # type: ignore[index]
    assert (len(by_trace), len(run_ids)) == (4, 1)
    for told in by_trace.values():
        assert [message.split()[0] for logger, message in told if logger == "pipeline.driver"] == ["shard", "shard"]
        assert [message.split(":")[0] for logger, message in told if logger == "workers.actor"][1:] == [
            "4 rows are read and with the engine",
            "4 samples are decoded",
            "the part is written",
        ]
