"""A job of many shards through many actors whose engines are simulated: efficiency, and what the driver spends.

    python -m infra.scale.actors [--shards 1000] [--workers 32] [--speed 5]

All but the engines is real: driver, Ray, reading, parts, commits. Engines take the step times of docs/performance.md,
`--speed` times as fast. The clock runs from the moment that all workers are ready to the last commit. Prints one JSON
line.

`efficiency` is the time in which full batches would do the work, divided over all workers, over the time it took; so it
counts engines that stand still, batches that are not full, and the end, when the last shards run out one by one.
`steady` is the same up to the moment that the last shard was begun.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.actor import ActorHandle

from infra.scale.simulated_engine import StepTime
from infra.scale.simulated_worker import Mark, SimulatedWorker, read_marks
from pipeline import driver
from pipeline.cluster_config import ClusterConfig
from pipeline.config import JobConfig, ModelConfig, SamplingConfig
from pipeline.data_config import InputConfig, OutputConfig
from pipeline.decoding_config import AutoregressiveConfig
from pipeline.preparation import prepare
from pipeline.records import Progress

ROWS_PER_SHARD = 64
SHARDS_PER_FILE = 100
LONGEST = 224
PROMPT_WORDS = 40
CPUS_PER_WORKER = 0.05
"""Sleeping takes none; Ray starts as many idle processes as there are CPUs."""
MAX_CONCURRENCY = 8
DAEMONS = ("gcs_server", "raylet")


@dataclass(frozen=True, slots=True)
class Usage:
    """What the driver's process and Ray's daemons have used so far."""

    shards: int
    at: float
    driver_cpu_s: float
    driver_mb: float
    daemons_cpu_s: dict[str, float]


class UsageLog:
    """A progress callback that notes the use of resources once all workers are ready, and at the last commit."""

    def __init__(self) -> None:
        self.notes: list[Usage] = []

    def __call__(self, progress: Progress) -> None:
        all_ready = all(worker.state != "loading" for worker in progress.workers)
        if (not self.notes and all_ready) or progress.shards_committed == progress.shards_total:
            self.notes.append(usage(progress.shards_committed))


def usage(shards: int) -> Usage:
    mine = psutil.Process()
    daemons = dict.fromkeys(DAEMONS, 0.0)
    for child in mine.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() in daemons:
                daemons[child.name()] += sum(child.cpu_times()[:2])
    return Usage(shards, time.time(), time.process_time(), mine.memory_info().rss / 2**20, daemons)


def write_prompts(folder: Path, shards: int) -> None:
    for start in range(0, shards, SHARDS_PER_FILE):
        rows = ROWS_PER_SHARD * min(SHARDS_PER_FILE, shards - start)
        prompts = [f"{start} {row} " + "word " * (PROMPT_WORDS - 2) for row in range(rows)]
        pq.write_table(pa.table({"prompt": prompts}), folder / f"{start:06d}.parquet", row_group_size=ROWS_PER_SHARD)


def job_of(folder: Path, shards: int, workers: int, cpus_per_worker: float = CPUS_PER_WORKER) -> JobConfig:
    """Rows of 16 to LONGEST new tokens in shards of ROWS_PER_SHARD, with the default slots of an engine."""
    inputs = folder / "inputs"
    inputs.mkdir()
    write_prompts(inputs, shards)
    return JobConfig(
        model=ModelConfig(id="simulated"),
        input=InputConfig(path=(str(inputs),)),
        output=OutputConfig(path=str(folder / "output"), rows_per_shard=ROWS_PER_SHARD),
        sampling=SamplingConfig(max_tokens=LONGEST),
        decoding=AutoregressiveConfig(),
        cluster=ClusterConfig(workers=workers, cpus_per_worker=cpus_per_worker),
    )


@contextmanager
def local_ray(workers: int) -> Iterator[None]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        num_cpus=max(1, math.ceil(workers * CPUS_PER_WORKER)),
        object_store_memory=80 * 2**20,
        include_dashboard=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
    )
    try:
        yield
    finally:
        ray.shutdown()


def run(folder: Path, shards: int, workers: int, speed: float) -> dict[str, Any]:
    """Runs the job, and its figures."""
    job = job_of(folder, shards, workers)
    scratch = folder / "scratch"
    scratch.mkdir()
    step_time = StepTime(scale=1.0 / speed)

    # Made once: Ray sends a class anew for every `ray.remote` of it.
    actor_class = ray.remote(SimulatedWorker).options(
        num_cpus=CPUS_PER_WORKER, max_concurrency=MAX_CONCURRENCY, max_restarts=0, max_task_retries=0
    )

    def start_worker(index: int) -> ActorHandle[Any]:
        handle = actor_class.remote(job, f"worker-{index}", step_time, str(scratch))
        assert isinstance(handle, ActorHandle)
        return handle

    log = UsageLog()
    prepared = prepare(job)
    with local_ray(workers):
        summary = driver.run(prepared, start_worker, log)
    assert summary.state == "done", summary
    assert summary.rows_ok == shards * ROWS_PER_SHARD, summary
    first, last = log.notes[0], log.notes[-1]
    began = max(file.stat().st_mtime for file in scratch.glob("*.ready"))
    return efficiency(read_marks(scratch), began, last.at) | spent(first, last) | stored(folder / "output", shards)


def efficiency(marks: list[list[Mark]], began: float, ended: float) -> dict[str, Any]:
    """Figures of the engines from what the workers noted."""
    last_begun = max(mark.at for worker in marks for mark in worker if mark.begins)
    work_s = sum(worker[-1].work_s for worker in marks)
    work_before = sum(
        float(np.interp(last_begun, [mark.at for mark in worker], [mark.work_s for mark in worker])) for worker in marks
    )
    return {
        "workers": len(marks),
        "seconds": round(ended - began, 2),
        "ideal_seconds": round(work_s / len(marks), 2),
        "efficiency": round(work_s / len(marks) / (ended - began), 4),
        "steady": round(work_before / len(marks) / (last_begun - began), 4),
        "busy": round(sum(worker[-1].busy_s for worker in marks) / len(marks) / (ended - began), 4),
        "last_wave_s": round(ended - last_begun, 2),
        "shard_s": round(work_s / sum(mark.begins for worker in marks for mark in worker), 3),
        "progress_calls": sum(worker[-1].progress_calls for worker in marks),
    }


def spent(first: Usage, last: Usage) -> dict[str, Any]:
    """What the driver and Ray's daemons used between two notes."""
    shards, seconds = last.shards - first.shards, last.at - first.at
    return {
        "overhead_ms_per_shard": round((last.driver_cpu_s - first.driver_cpu_s) / shards * 1e3, 3),
        "driver_cpu_share": round((last.driver_cpu_s - first.driver_cpu_s) / seconds, 4),
        "driver_kb_per_shard": round((last.driver_mb - first.driver_mb) * 1024 / shards, 2),
        "daemon_cpu_share": {
            name: round((last.daemons_cpu_s[name] - first.daemons_cpu_s[name]) / seconds, 4) for name in DAEMONS
        },
    }


def stored(output: Path, shards: int) -> dict[str, Any]:
    """Bytes kept of a shard beside its part: its commit, its line in the log of commits, its row of the plan."""
    commits = sum(file.stat().st_size for file in (output / "_commits").iterdir())
    sizes = {"commit": commits, "log": (output / "_commits.jsonl.gz").stat().st_size}
    sizes["plan"] = (output / "_plan.parquet").stat().st_size
    return {"stored_bytes_per_shard": {name: round(size / shards, 1) for name, size in sizes.items()}}


@click.command()
@click.option("--shards", default=1000, show_default=True)
@click.option("--workers", default=32, show_default=True)
@click.option("--speed", default=5.0, show_default=True, help="how many times faster than measured the engines are")
def main(shards: int, workers: int, speed: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(Path(folder), shards, workers, speed)))


if __name__ == "__main__":
    main()
