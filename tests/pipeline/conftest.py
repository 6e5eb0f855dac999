"""What the tests of the pipeline share: an S3 server on loopback, an empty folder in each store, jobs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import JobConfig
from pipeline.config_io import parse_job
from tests.s3_server import s3_for_clients


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[str]:
    """`s3://..` of a bucket on moto's server; clients find it as users make them: by AWS_* variables."""
    import boto3

    with s3_for_clients():
        boto3.client("s3").create_bucket(Bucket="bucket")
        yield "s3://bucket"


@pytest.fixture(params=["local", "memory", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty folder, once in each kind of store."""
    name = f"{tmp_path.name}-{os.getpid()}"
    if request.param == "s3":
        return f"{request.getfixturevalue('s3_bucket')}/{name}"
    return f"memory://{name}" if request.param == "memory" else str(tmp_path / "root")


MakeJob = Callable[..., JobConfig]


@pytest.fixture
def make_job(tmp_path: Path) -> MakeJob:
    """A job from overrides: `make_job("input.limit=3")`; input and output lie in the test's folder."""

    def make(*overrides: str, **sections: Any) -> JobConfig:
        data = {"model": "tiny", "input": str(tmp_path / "in.parquet"), "output": str(tmp_path / "out"), **sections}
        return parse_job(data, overrides)

    return make
