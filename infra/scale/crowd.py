"""What the driver spends on very many workers: they are no processes but entries of a few, and their shards only time.

    python -m infra.scale.crowd [--workers 1000] [--shards 4000] [--shard-s 20]

The driver, its calls through Ray and its commits are real; reading, engines and parts are left out. One JSON line:
driver CPU per second and per shard, and `efficiency`, the shards that came back over those that could have, both from
when a tenth of them was committed.
Two runs with different `--shard-s` tell what a shard costs from what a worker costs that is only there.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import click
import ray

from infra.scale.actors import Usage, job_of, local_ray, spent, usage
from pipeline import driver
from pipeline.config import JobConfig
from pipeline.preparation import prepare
from pipeline.records import AcceptanceStats, PartReceipt, Progress, ShardTask, WorkerProgress

HOSTS = 4
AT_ONCE = 10_000
"""Calls that a host serves at the same time."""


class Host:
    """Many workers in one process. Each has two shards in hand and works at one after the other."""

    def __init__(self, shard_s: float) -> None:
        self._shard_s = shard_s
        self._turns: dict[int, asyncio.Lock] = {}
        self._done: dict[int, int] = {}

    async def ready(self, worker: int) -> str:
        return "simulated"

    async def generate(self, worker: int, task: ShardTask) -> PartReceipt:
        async with self._turns.setdefault(worker, asyncio.Lock()):
            await asyncio.sleep(self._shard_s)
        rows = task.shard.num_rows
        self._done[worker] = self._done.get(worker, 0) + rows
        return PartReceipt(
            shard_index=task.shard.index,
            attempt=task.attempt,
            path=task.part_name,
            num_rows=rows,
            num_failed=0,
            num_bytes=1,
            prompt_tokens=rows,
            completion_tokens=rows,
            stats=_stats(rows),
            errors={},
            seconds=self._shard_s,
            worker=f"worker-{worker}",
        )

    async def withdraw(self, worker: int, part_name: str) -> None:
        return None

    async def progress(self, worker: int) -> WorkerProgress:
        done = self._done.get(worker, 0)
        return WorkerProgress(f"worker-{worker}", "running", done, 0, done, 1, 1, _stats(done))

    async def locate(self, worker: int, where: Callable[[Any], str]) -> str:
        return where(self)


class _Method:
    def __init__(self, method: Any, worker: int) -> None:
        self._method = method
        self._worker = worker

    def remote(self, *args: Any) -> Any:
        return self._method.remote(self._worker, *args)


class Handle:
    """One worker of a host, as the driver sees it."""

    def __init__(self, host: Any, worker: int) -> None:
        self.ready = _Method(host.ready, worker)
        self.generate = _Method(host.generate, worker)
        self.withdraw = _Method(host.withdraw, worker)
        self.progress = _Method(host.progress, worker)
        self.__ray_call__ = _Method(host.locate, worker)


def _stats(tokens: int) -> AcceptanceStats:
    return AcceptanceStats(num_steps=tokens, acceptance_histogram=(tokens,), window_histogram=(tokens,))


class Watch:
    """Notes the use of resources from when a tenth of the shards is committed to the last."""

    def __init__(self) -> None:
        self.notes: list[Usage] = []

    def __call__(self, progress: Progress) -> None:
        done, total = progress.shards_committed, progress.shards_total
        if (not self.notes and done >= total / 10) or done == total:
            self.notes.append(usage(done))


def run(job: JobConfig, shard_s: float) -> dict[str, Any]:
    workers = job.cluster.min_workers
    prepared = prepare(job)
    watch = Watch()
    # No worker is a process that could be ended.
    with local_ray(HOSTS), mock.patch("pipeline.crew.kill"):
        hosts = [ray.remote(Host).options(max_concurrency=AT_ONCE, num_cpus=0).remote(shard_s) for _ in range(HOSTS)]
        driver.run(prepared, lambda index: Handle(hosts[index % HOSTS], index), watch)
    first, last = watch.notes[0], watch.notes[-1]
    rate = (last.shards - first.shards) / (last.at - first.at)
    return {
        "workers": workers,
        "shards": len(prepared.plan.shards),
        "shard_s": shard_s,
        "shards_per_s": round(rate, 2),
        "efficiency": round(rate * shard_s / workers, 4),
    } | spent(first, last)


@click.command()
@click.option("--workers", default=1000, show_default=True)
@click.option("--shards", default=4000, show_default=True)
@click.option("--shard-s", default=20.0, show_default=True, help="seconds of a shard")
def main(workers: int, shards: int, shard_s: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(job_of(Path(folder), shards, workers, cpus_per_worker=0.0), shard_s)))


if __name__ == "__main__":
    main()
