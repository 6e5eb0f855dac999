"""Requests to the object store of each stage of a job, counted at moto's server.

    python -m infra.scale.store_requests [--files 10] [--shards-per-file 4]

One process does in turn what driver and workers do: planning, reading prompts and writing parts (with the simulated
worker), commits, heartbeats, resuming, and the end. Prints one JSON line: requests by method, per file, shard,
heartbeat or job.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
import s3fs
from moto.server import ThreadedMotoServer

from infra.chaos.proxy import FaultProxy, Kind
from infra.scale.simulated_engine import StepTime
from infra.scale.simulated_worker import REVISION, SimulatedWorker
from pipeline.commits import JobStore
from pipeline.config import JobConfig, ModelConfig, SamplingConfig
from pipeline.data_config import InputConfig, OutputConfig
from pipeline.preparation import Prepared, prepare
from pipeline.records import PartReceipt, ShardTask
from pipeline.summary import summarise
from pipeline.tenure import Tenure

ROWS_PER_SHARD = 8


class CountingProxy(FaultProxy):
    """Does no harm; counts requests by method."""

    def __init__(self, target: str) -> None:
        super().__init__(target, seed=0)
        self.methods: Counter[str] = Counter()

    def draw(self, method: str, path: str) -> Kind | None:
        self.methods[method] += 1
        return super().draw(method, path)

    @contextmanager
    def counted(self, figures: dict[str, Any], name: str, per: int = 1) -> Iterator[None]:
        """Requests made within, divided by `per`, under a name."""
        self.methods.clear()
        yield
        figures[name] = {method: round(count / per, 2) for method, count in sorted(self.methods.items())}


def job_in(bucket: str) -> JobConfig:
    return JobConfig(
        model=ModelConfig(id="simulated"),
        input=InputConfig(path=(f"s3://{bucket}/in/",)),
        output=OutputConfig(path=f"s3://{bucket}/out", rows_per_shard=ROWS_PER_SHARD),
        sampling=SamplingConfig(max_tokens=16),
    )


def write_inputs(bucket: str, files: int, rows: int) -> None:
    store = s3fs.S3FileSystem()
    store.mkdir(bucket)
    for number in range(files):
        with store.open(f"{bucket}/in/{number:05d}.parquet", "wb") as file:
            pq.write_table(pa.table({"prompt": [f"prompt {number} {row}" for row in range(rows)]}), file)


def generated(prepared: Prepared) -> list[PartReceipt]:
    with tempfile.TemporaryDirectory() as scratch:
        worker = SimulatedWorker(prepared.config, "worker-0", StepTime(scale=1e-6), scratch)
        worker.ready()
        return [
            worker.generate(ShardTask(shard, 1, "run", prepared.config.output.path, prepared.plan.passthrough))
            for shard in prepared.plan.shards
        ]


def run(proxy: CountingProxy, files: int, shards_per_file: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    job = job_in("bucket")
    write_inputs("bucket", files, ROWS_PER_SHARD * shards_per_file)
    with proxy.counted(figures, "plan, per file", files):
        prepared = prepare(job)
    store, shards = JobStore(prepared.config.output.path), len(prepared.plan.shards)
    with proxy.counted(figures, "making the job, once"):
        store.create_or_resume(prepared.config, prepared.plan, REVISION)
    with proxy.counted(figures, "reading and writing, per shard", shards):
        receipts = generated(prepared)
    with proxy.counted(figures, "commit, per shard", shards):
        standing = [store.commit(receipt) for receipt in receipts]
    tenure = Tenure(store, "run")
    tenure.begin()
    with proxy.counted(figures, "heartbeat"):
        tenure.beat()
    with proxy.counted(figures, "resume, once"):
        resumed = prepare(job)
    assert not resumed.remaining, resumed.remaining
    summary = summarise(standing, prepared.plan, prepared.config, "done")
    with proxy.counted(figures, "end, once"):
        store.finish(prepared.config, standing, summary.metrics())
    return {"files": files, "shards": shards} | figures


@click.command()
@click.option("--files", default=10, show_default=True)
@click.option("--shards-per-file", default=4, show_default=True)
def main(files: int, shards_per_file: int) -> None:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    credentials = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing", "AWS_DEFAULT_REGION": "us-east-1"}
    with CountingProxy(f"http://{host}:{port}") as proxy:
        os.environ.update(credentials, AWS_ENDPOINT_URL=proxy.url)
        print(json.dumps(run(proxy, files, shards_per_file)))
    server.stop()


if __name__ == "__main__":
    main()
