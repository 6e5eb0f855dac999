from __future__ import annotations

from typing import Any

import pytest

from pipeline.cluster_config import ClusterConfig
from pipeline.config_io import parse_job
from pipeline.elasticity import SHORTAGE_PERIOD_S, ShortageNotice, check_resources, room_on
from pipeline.errors import ConfigError


@pytest.mark.parametrize(
    ("cluster", "nodes", "sentence"),
    [
        (
            {"workers": 2, "gpus_per_worker": 1},
            [{"CPU": 8.0}],
            "cluster.gpus_per_worker asks for 2 GPUs in all (1 for each of 2 workers), the cluster has 0",
        ),
        (
            {"workers": 3, "cpus_per_worker": 1.5},
            [{"CPU": 2.0}, {"CPU": 2.0}],
            "cluster.cpus_per_worker asks for 4.5 CPUs in all (1.5 for each of 3 workers), the cluster has 4",
        ),
        (
            {"workers": 1, "gpus_per_worker": 4},
            [{"CPU": 8.0, "GPU": 2.0}] * 2,
            "cluster.gpus_per_worker asks for 4 GPUs of one machine, the largest has 2",
        ),
        (
            {"workers": 3, "cpus_per_worker": 2},
            [{"CPU": 3.0}, {"CPU": 3.0}],
            "cluster.workers asks for 3 workers of 2 CPUs and 0 GPUs each, the machines of the cluster have room for 2",
        ),
        (
            {"workers": 2, "gpus_per_worker": 1, "tensor_parallel": 4},
            [{"CPU": 8.0, "GPU": 7.0}],
            "cluster.gpus_per_worker asks for 8 GPUs in all (4 for each of 2 workers of 4 processes), the cluster has "
            "7",
        ),
        (
            {"workers": 1, "gpus_per_worker": 1, "tensor_parallel": 8},
            [{"CPU": 8.0, "GPU": 4.0}] * 2,
            "cluster.gpus_per_worker asks for 8 GPUs of one machine, the largest has 4",
        ),
        (
            {"workers": {"min": 3, "max": 9}, "gpus_per_worker": 1},
            [{"CPU": 2.0, "GPU": 8.0}, {"CPU": 64.0}],
            "cluster.workers asks for 3 workers of 1 CPUs and 1 GPUs each, the machines of the cluster have room for 2",
        ),
    ],
)
def test_more_than_the_cluster_has(cluster: dict[str, Any], nodes: list[dict[str, float]], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_resources(ClusterConfig(**cluster), nodes)
    assert str(raised.value) == sentence


@pytest.mark.parametrize(
    ("cluster", "nodes"),
    [
        ({"workers": {"min": 2, "max": 32}, "cpus_per_worker": 2}, [{"CPU": 3.0}, {"CPU": 3.0}]),
        ({"workers": 3, "cpus_per_worker": 0.1}, [{"CPU": 0.3}]),
        ({"workers": 100, "cpus_per_worker": 0}, [{"CPU": 1.0}]),
        ({"workers": 2, "gpus_per_worker": 1, "tensor_parallel": 2}, [{"CPU": 2.0, "GPU": 2.0}] * 2),
        ({"workers": 9, "gpus_per_worker": 1}, [{"CPU": 96.0, "GPU": 8.0}, {"CPU": 8.0}, {"CPU": 4.0, "GPU": 1.0}]),
    ],
)
def test_what_fits(cluster: dict[str, Any], nodes: list[dict[str, float]]) -> None:
    check_resources(ClusterConfig(**cluster), nodes)


def test_room_on_one_machine() -> None:
    cluster = ClusterConfig(cpus_per_worker=2, gpus_per_worker=1)
    assert room_on(cluster, {"CPU": 7.0, "GPU": 2.0}) == 2
    assert room_on(cluster, {"CPU": 7.0}) == 0


def test_a_lack_of_workers_is_told_now_and_then() -> None:
    notice = ShortageNotice(ClusterConfig(workers={"min": 3, "max": 8}))
    late = SHORTAGE_PERIOD_S + 1
    assert notice.see(0.0, placed=1) is None
    sentence = "1 of 3 workers have a machine; the others wait until the cluster has room"
    assert [notice.see(now, placed=1) for now in (late, late + 1, 2 * late)] == [sentence, None, sentence]
    assert notice.see(3 * late, placed=3) is None
    assert notice.see(4 * late, placed=2) is None, "it has only just begun"


@pytest.mark.parametrize(
    ("workers", "sentence"),
    [
        (0, "cluster.workers must be at least 1, got 0"),
        (2.5, "cluster.workers must be a whole number or {min: .., max: ..}, got 2.5"),
        ({"min": 2}, "cluster.workers must be a whole number or {min: .., max: ..}, got {'min': 2}"),
        ({"min": 3, "max": 2}, "cluster.workers must have 1 <= min <= max, got {'min': 3, 'max': 2}"),
    ],
)
def test_a_number_or_a_range_of_workers(workers: Any, sentence: str) -> None:
    job = {"model": "m", "input": "i", "output": "o"}
    with pytest.raises(ConfigError) as raised:
        parse_job({**job, "cluster": {"workers": workers}})
    assert str(raised.value) == sentence
    elastic = parse_job({**job, "cluster": {"workers": {"min": 2, "max": 8}}})
    assert (elastic.cluster.min_workers, elastic.cluster.max_workers) == (2, 8)
    assert parse_job(elastic.model_dump(mode="json")) == elastic
