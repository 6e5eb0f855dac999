"""Machines that come and go under a running job: a cluster of several raylets on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from pipeline.records import Progress
from tests.pipeline.conftest import MakeJob
from tests.pipeline.echo import expected, generations, job_runner, log_lines

pytestmark = pytest.mark.ray

STORE = {"object_store_memory": 80 * 2**20}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head with room for two workers."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **STORE})
    ray.init(address=cluster.address, logging_level="error")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_workers_join_with_a_machine_and_are_lost_with_it(
    cluster: Cluster, tmp_path: Path, make_job: MakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    """The workers of the head wait at a gate; what is committed before it opens is the work of those that joined."""
    machines: list[Any] = []

    def come_and_go(progress: Progress) -> None:
        at_work = sum(worker.state == "running" for worker in progress.workers)
        if at_work >= 2 and not machines:
            machines.append(cluster.add_node(num_cpus=1, **STORE))
        elif progress.shards_committed and len(machines) == 1:
            cluster.remove_node(machines[0])
            machines.append(None)
            (tmp_path / "gate").touch()

    prompts = ["!gate", "a"] * 4 + ["!slow", "a"] * 16
    workers = "cluster.workers={min: 2, max: 4}"
    summary = job_runner(tmp_path, make_job)(prompts, workers, on_progress=come_and_go)
    assert (summary.state, summary.rows_failed) == ("done", 0)
    assert generations(tmp_path) == expected(prompts)
    assert any("goes back (loss)" in line for line in caplog.messages), caplog.messages
    assert "(death)" not in caplog.text, "a lost machine blames no shard"
    assert 20 < len(log_lines(tmp_path, "generate")) <= 24, "only what was on the machine is done again"
