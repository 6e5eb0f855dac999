"""A job whose input and output live in S3, against moto's server, read back by other tools."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
import s3fs

from tests.s3_server import s3_for_clients

pytestmark = pytest.mark.ray

MakeJob = Callable[..., Any]
RunCli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def s3() -> Iterator[s3fs.S3FileSystem]:
    with s3_for_clients():
        store = s3fs.S3FileSystem(use_listings_cache=False)
        store.mkdir("jobs")
        yield store


def test_a_job_in_s3(make_job: MakeJob, run_cli: RunCli, s3: s3fs.S3FileSystem, tmp_path: Path) -> None:
    prompts = [f"One step of seven-league boots, number {i}." for i in range(20)]
    local = make_job(prompts)
    s3.put_file(str(local.file.with_suffix(".parquet")), "jobs/in/prompts.parquet")

    job = make_job("s3://jobs/in/*.parquet", name="s3", output={"path": "s3://jobs/out"})
    result = run_cli("run", job.file)
    assert result.returncode == 0, result.stderr
    assert "s3://jobs/out" in result.stdout

    status = json.loads(run_cli("status", "s3://jobs/out", "--json").stdout)
    assert (status["state"], status["shards"]["committed"], status["rows"]["ok"]) == ("done", 5, 20)
    paths = [part["path"] for part in json.loads(s3.cat_file("jobs/out/_manifest.json"))["parts"]]

    loaded = datasets.load_dataset(
        "parquet",
        data_files=[f"s3://jobs/out/{path}" for path in paths],
        split="train",
        cache_dir=str(tmp_path / "cache"),
        storage_options={"endpoint_url": os.environ["AWS_ENDPOINT_URL"]},
    )
    assert sorted(loaded["prompt"]) == sorted(prompts)

    endpoint = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    arrow_s3 = pyarrow.fs.S3FileSystem(endpoint_override=endpoint, scheme="http", region="us-east-1")
    tables = [pq.read_table(f"jobs/out/{path}", filesystem=arrow_s3) for path in paths]
    assert sum(table.num_rows for table in tables) == 20
    assert len({uid for table in tables for uid in table["id"].to_pylist()}) == 20
    assert sorted(text for table in tables for text in table["generation"].to_pylist()) == sorted(loaded["generation"])
