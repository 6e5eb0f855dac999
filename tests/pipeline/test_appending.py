"""New input files for a job that has begun, or is finished (`input.allow_append`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.commits import JobStore
from pipeline.config import JobConfig
from pipeline.errors import ConfigError
from pipeline.preparation import Prepared, prepare
from pipeline.summary import status_of
from tests.pipeline.conftest import MakeJob
from tests.pipeline.makers import make_receipt, write_jsonl, write_parquet


@pytest.fixture
def config(tmp_path: Path, make_job: MakeJob) -> JobConfig:
    """A job over a folder that holds five rows in `m.parquet` as yet."""
    write_parquet(tmp_path / "in" / "m.parquet", {"text": [f"m{i}" for i in range(5)], "key": [*range(5)]})
    return make_job(
        f"input={tmp_path}/in",
        "input.allow_append=true",
        "input.id_column=key",
        "output.columns=[key]",
        "output.rows_per_shard=2",
    )


def begin(config: JobConfig) -> Prepared:
    ready = prepare(config)
    JobStore(ready.config.output.path).create_or_resume(ready.config, ready.plan, "rev")
    return ready


def finish(config: JobConfig) -> JobStore:
    ready = begin(config)
    store = JobStore(ready.config.output.path)
    for shard in ready.remaining:
        store.commit(make_receipt(shard.index))
    store.finish(ready.config, store.committed().values(), {})
    return store


def refusal(config: JobConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        prepare(config)
    return str(caught.value)


def test_new_files_follow_the_old_ones(tmp_path: Path, config: JobConfig) -> None:
    """Also a file that sorts before: shards that are there keep their numbers, and a finished job is open again."""
    store = finish(config)
    before = store.load_plan()
    assert before is not None
    write_parquet(tmp_path / "in" / "a.parquet", {"text": ["a", "b", "c"], "key": [10, 11, 12]})
    ready = prepare(config)
    assert [(s.index, s.label, s.start_row) for s in ready.remaining] == [(3, "a.parquet", 0), (4, "a.parquet", 2)]
    assert store.state() == "done"  # to prepare changes nothing
    assert begin(config).plan == ready.plan
    assert store.state() == "planned"
    assert (status_of(store.output).rows_total, store.load_plan()) == (8, ready.plan)
    assert ready.plan.shards[:3] == before.shards
    assert {f"input file '{name}.parquet'" for name in "am"} <= json.loads(
        (tmp_path / "out" / "_job.json").read_bytes()
    )["identity"].keys()
    finish(config)
    assert (store.state(), len(store.committed())) == ("done", 5)
    assert prepare(config).remaining == []


def test_a_driver_that_dies_between_plan_and_identity_has_lost_nothing(
    tmp_path: Path, config: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(config)
    write_parquet(tmp_path / "in" / "a.parquet", {"text": ["a"], "key": [10]})
    ready = prepare(config)
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.storage.delete", lambda path: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            JobStore(ready.config.output.path).create_or_resume(ready.config, ready.plan, "rev")
    assert [shard.index for shard in begin(config).remaining] == [0, 1, 2, 3]
    strict = config.model_copy(update={"input": config.input.model_copy(update={"allow_append": False})})
    assert len(prepare(strict).remaining) == 4


def test_without_the_key_new_files_are_refused(tmp_path: Path, config: JobConfig) -> None:
    begin(config)
    write_parquet(tmp_path / "in" / "a.parquet", {"text": ["a"], "key": [10]})
    strict = config.model_copy(update={"input": config.input.model_copy(update={"allow_append": False})})
    assert "input file 'a.parquet' was absent and is " in refusal(strict)


def test_old_files_must_be_there_as_they_were(tmp_path: Path, config: JobConfig) -> None:
    begin(config)
    write_parquet(tmp_path / "in" / "m.parquet", {"text": ["other"], "key": [1]})
    write_parquet(tmp_path / "in" / "a.parquet", {"text": ["a"], "key": [10]})
    assert "input file 'm.parquet' was " in refusal(config)
    (tmp_path / "in" / "m.parquet").unlink()
    assert "input file 'm.parquet' was " in refusal(config)
    assert "and is absent now" in refusal(config)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{"text": "a", "key": 4}], "input.id_column must hold unique ids, got '4' twice: row 4 of "),
        (
            [{"text": "a", "key": "k"}],
            "output.columns must hold values of one type, got int64 and string for column 'key' in file ",
        ),
    ],
)
def test_new_rows_must_fit_the_old_ones(
    tmp_path: Path, config: JobConfig, rows: list[dict[str, Any]], sentence: str
) -> None:
    begin(config)
    write_jsonl(tmp_path / "in" / "a.jsonl", rows)
    assert refusal(config).startswith(sentence)


def test_copied_columns_keep_their_types(tmp_path: Path, config: JobConfig) -> None:
    begin(config)
    write_parquet(tmp_path / "in" / "a.parquet", {"text": ["a"], "key": [10], "more": [1]})
    assert len(prepare(config).remaining) == 4
    wider = config.model_copy(
        update={
            "input": config.input.model_copy(update={"id_column": None}),
            "output": config.output.model_copy(update={"path": str(tmp_path / "wider")}),
        }
    )
    (tmp_path / "in" / "a.parquet").unlink()
    begin(wider)
    write_parquet(tmp_path / "in" / "a.parquet", {"text": ["a"], "key": [1.5]})
    assert refusal(wider) == (
        "output.columns must keep their types where files are appended, got double for column 'key', which was int64"
    )


def test_a_limit_and_new_files_exclude_each_other(make_job: MakeJob) -> None:
    with pytest.raises(ConfigError) as caught:
        make_job("input.allow_append=true", "input.limit=3")
    assert str(caught.value) == "input.limit must be null where allow_append is true, got 3"
