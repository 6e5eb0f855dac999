from __future__ import annotations

import logging
import shutil
from pathlib import Path

import fsspec
import pytest

from pipeline.commits import JobStore
from pipeline.errors import ConfigError
from pipeline.preparation import prepare
from tests.pipeline.conftest import MakeJob
from tests.pipeline.makers import Careless, make_receipt, write_parquet


def test_paths_are_made_absolute(tmp_path: Path, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "in.parquet", {"text": ["a"]})
    monkeypatch.chdir(tmp_path)
    ready = prepare(make_job("input=in.parquet", "output=out"))
    assert ready.config.output.path == str(tmp_path / "out")
    assert [shard.path for shard in ready.remaining] == [str(tmp_path / "in.parquet")]


def test_a_store_without_conditional_put_is_warned_of(
    tmp_path: Path, make_job: MakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    fsspec.register_implementation("careless", Careless, clobber=True)
    write_parquet(tmp_path / "in.parquet", {"text": ["a"]})
    with caplog.at_level(logging.WARNING, logger="pipeline"):
        prepare(make_job(f"output=memory://{tmp_path.name}"))
        assert not caplog.records
        prepare(make_job("output=careless://out"))
    assert "the store of careless://out has no conditional put" in caplog.text


def test_a_resumed_job_follows_input_that_moved(tmp_path: Path, make_job: MakeJob) -> None:
    old, new = tmp_path / "in.parquet", tmp_path / "moved" / "in.parquet"
    write_parquet(old, {"text": ["a", "b", "c"]})
    config = make_job("output.rows_per_shard=2")
    first = prepare(config)
    store = JobStore(first.config.output.path)
    store.create_or_resume(first.config, first.plan, "rev")
    store.commit(make_receipt(0))
    new.parent.mkdir()
    shutil.move(old, new)
    again = prepare(make_job("output.rows_per_shard=2", f"input={new}"))
    assert [shard.index for shard in again.remaining] == [1]
    assert again.remaining[0].path == str(new)


def test_outputs_that_cannot_be_written_are_refused_before_anything_starts(tmp_path: Path, make_job: MakeJob) -> None:
    write_parquet(tmp_path / "in.parquet", {"text": ["a"]})
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"output.path must be writable, got"):
        prepare(make_job(f"output={tmp_path}/file/out"))
