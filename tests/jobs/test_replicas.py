"""A worker of two processes, through Ray: the data of one process, also when one of the two is killed on the way."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from ray.util import placement_group_table

from jobs.ray_session import ray_session
from jobs.run import run_job
from pipeline.config_io import load_job
from pipeline.records import Progress

PROMPTS = [f"One step of seven-league boots, number {i}." for i in range(24)]
SETTINGS = {
    "model": {"dtype": "float64"},  # sums over processes round in another order
    "output": {"rows_per_shard": 2},
    "sampling": {"max_tokens": 40, "ignore_eos": True},
}
SAME = ("id", "sample_index", "generation", "completion_token_ids", "finish_reason", "seed")


def rows_of(output: Path) -> list[tuple[str, ...]]:
    manifest = json.loads((output / "_manifest.json").read_text())
    rows = [row for part in manifest["parts"] for row in pq.read_table(output / part["path"]).to_pylist()]
    return sorted(tuple(str(row[key]) for key in SAME) for row in rows)


def followers() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    with contextlib.suppress(psutil.Error):  # processes that end just now
        return [child for child in children if "FollowerActor" in " ".join(child.cmdline())]
    return []


@pytest.mark.ray
def test_a_replica_gives_the_data_of_one_process_and_starts_again_as_a_whole(
    make_job: Callable[..., Any], run_here: Callable[[Any], None]
) -> None:
    calm = make_job(PROMPTS, name="calm", **SETTINGS)
    run_here(calm)
    job = make_job(calm.file.with_suffix(".parquet"), name="parallel", cluster={"tensor_parallel": 2}, **SETTINGS)
    config = load_job(str(job.file))
    killed: list[psutil.Process] = []

    def kill_follower(progress: Progress) -> None:
        if progress.shards_committed and not killed and (found := followers()):
            found[0].kill()
            killed.extend(found)

    with ray_session(config):
        run_job(config, on_progress=kill_follower)
        groups = placement_group_table().values()
        assert [group["state"] for group in groups] == ["REMOVED", "REMOVED"], "one for each start of the replica"
    assert len(killed) == 1
    assert max(json.loads(path.read_text())["attempt"] for path in job.output.glob("_commits/*.json")) == 2
    assert rows_of(job.output) == rows_of(calm.output)
