from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import datasets
import pytest

from pipeline import storage
from pipeline.commits import LEASE_S, JobStore, job_identity
from pipeline.errors import ConfigError
from pipeline.inputs import InputFile
from pipeline.parts import write_part
from pipeline.preparation import prepare
from pipeline.shards import plan
from pipeline.summary import acceptance_by, status_of
from tests.pipeline.conftest import MakeJob
from tests.pipeline.makers import STATS, make_error, make_receipt, make_record, make_task, write_parquet

FILE = InputFile("/d/a.parquet", "a.parquet", "parquet", 10, "abc")


def test_commits_are_read_back_from_storage_alone(root: str) -> None:
    receipts = {i: make_receipt(i) for i in (0, 2, 11)}
    for receipt in receipts.values():
        assert JobStore(root).commit(receipt) == receipt
    assert JobStore(root).committed() == receipts


def test_the_second_commit_of_a_shard_loses_and_its_part_goes(root: str) -> None:
    store = JobStore(root)
    first, second = make_receipt(0, "data/first.parquet"), make_receipt(0, "data/second.parquet")
    for receipt in (first, second):
        storage.write_bytes(storage.join(root, receipt.path), b"part")
    assert store.commit(first) == first
    assert store.commit(second) == first
    assert storage.list_names(storage.join(root, "data")) == ["first.parquet"]


def test_a_commit_that_is_repeated_keeps_its_part(root: str) -> None:
    """As when the answer to a put is lost on the way and the put is sent again."""
    store, receipt = JobStore(root), make_receipt(0)
    storage.write_bytes(storage.join(root, receipt.path), b"part")
    assert [store.commit(receipt), store.commit(receipt)] == [receipt, receipt]
    assert storage.exists(storage.join(root, receipt.path))


def test_another_job_in_the_same_output_is_refused_with_the_differences(tmp_path: Path, make_job: MakeJob) -> None:
    out = str(tmp_path / "out")
    path = write_parquet(tmp_path / "in.parquet", {"text": ["a"]})
    config = make_job()
    job_plan = plan(config)
    store = JobStore(out)
    store.check_identity(config, job_plan.files)
    store.create_or_resume(config, job_plan, "rev")
    store.create_or_resume(config, job_plan, "rev")

    def refusal(*overrides: str) -> str:
        with pytest.raises(ConfigError) as raised:
            prepare(make_job(*overrides))
        return str(raised.value)

    rule = f"output.path must be empty or hold the same job, got {out!r} where"
    assert refusal("sampling.seed=1", "sampling.stop=[x]") == (
        f'{rule} sampling.stop was [] and is ["x"] now, sampling.seed was 0 and is 1 now'
    )
    assert refusal("model=other") == f'{rule} model.id was "tiny" and is "other" now'
    other = InputFile(path, "in.parquet", "parquet", 11, "xyz")
    with pytest.raises(ConfigError) as raised:
        store.check_identity(config, [other, FILE])
    was = f"{job_plan.files[0].size} bytes with content {job_plan.files[0].etag}"
    assert str(raised.value) == (
        f"{rule} input file 'in.parquet' was {was} and is 11 bytes with content xyz now, "
        "input file 'a.parquet' was absent and is 10 bytes with content abc now"
    )
    with pytest.raises(ConfigError) as raised:
        store.create_or_resume(config, job_plan, "newer")
    assert str(raised.value) == f'{rule} model revision as loaded was "rev" and is "newer" now'


def test_what_only_decides_speed_or_place_is_no_part_of_the_identity(make_job: MakeJob) -> None:
    moved = dataclasses.replace(FILE, path="s3://elsewhere/a.parquet")
    fast = make_job("decoding=suffix", "engine.max_sequences=3", "cluster.workers=2", "model.device=cpu", "output=o")
    assert job_identity(make_job(), [FILE]) == job_identity(fast, [moved])
    assert job_identity(make_job(), [FILE]) != job_identity(make_job("output.rows_per_shard=3"), [FILE])


def test_credentials_are_not_stored(tmp_path: Path, make_job: MakeJob) -> None:
    write_parquet(tmp_path / "in.parquet", {"text": ["a"]})
    config = make_job()
    secret = make_job("model=https://user:password@host/model.gguf?token=secret")
    JobStore(str(tmp_path / "out")).create_or_resume(secret, plan(config), "rev")
    stored = (tmp_path / "out" / "_job.json").read_text()
    assert "https://***@host/model.gguf?***" in stored
    assert "password" not in stored
    assert "secret" not in stored


def test_states_are_told_from_storage(tmp_path: Path, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    out = str(tmp_path / "out")
    store = JobStore(out)
    with pytest.raises(ConfigError) as raised:
        store.state()
    assert str(raised.value) == f"output.path must be the output of a job, got {out!r}"
    write_parquet(tmp_path / "in.parquet", {"text": ["a"]})
    config = make_job()
    store.create_or_resume(config, plan(config), "rev")
    assert store.state() == "planned"
    store.set_state("running", "run")
    assert store.state() == "running"
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + LEASE_S + 1)
    assert store.state() == "interrupted"
    store.set_state("failed", "run", "no model")
    assert store.state() == "failed"
    store.finish(config, [], {})
    assert store.state() == "done"


def test_a_finished_output(tmp_path: Path, make_job: MakeJob) -> None:
    """Two shards, one with two attempts: the orphan goes, and manifest, card and figures name what is committed."""
    write_parquet(tmp_path / "in.parquet", {"text": list("abcd"), "task": ["x", "y", "x", "y"]})
    config = make_job("output.columns=[task]", "output.rows_per_shard=2")
    out, job_plan = str(tmp_path / "out"), plan(config)
    store = JobStore(out)
    store.create_or_resume(config, job_plan, "rev")
    for index, attempt in ((0, 1), (0, 2), (1, 1)):
        task = make_task(out, 2, index, attempt, passthrough=job_plan.passthrough)
        records = [make_record(f"{index}a", passthrough={"task": "x"}), make_error(f"{index}b")]
        receipt = write_part(task, records, config, "rev", "worker-0", 1.0)
        if (index, attempt) != (0, 1):
            store.commit(receipt)
    status = status_of(out)
    assert status.to_json() == {
        "state": "planned",
        "shards": {"total": 2, "committed": 2},
        "rows": {"total": 4, "ok": 2, "failed": 2},
        "completion_tokens": 10,
        "num_steps": 6,
        "tokens_per_step": 10 / 6,
        "mean_acceptance_length": 1 + 4 / 6,
    }
    assert status.errors == {"null_prompt": 2}
    (tmp_path / "out" / "data" / f".part-00009.parquet.{'0a' * 16}").write_bytes(
        b"half of a part whose writer was killed"
    )
    store.finish(config, store.committed().values(), status.metrics())
    assert not [path for path in (tmp_path / "out" / "data").iterdir() if path.name.startswith(".")]
    names = ["part-00000-run-2.parquet", "part-00001-run-1.parquet"]
    assert storage.list_names(storage.join(out, "data")) == names
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    assert [part["path"] for part in manifest["parts"]] == [f"data/{name}" for name in names]
    assert (manifest["rows"], manifest["failed"]) == (4, 2)
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["accepted_by_drafter"] == {"suffix": 4}
    groups = acceptance_by(out, "task")
    assert {name: (group.rows, group.failed, group.stats) for name, group in groups.items()} == {
        "x": (2, 0, STATS + STATS),
        "None": (2, 2, STATS.__class__()),
    }
    with pytest.raises(ConfigError, match="the column must be one of the output, got 'tsak'"):
        acceptance_by(out, "tsak")
    loaded = datasets.load_dataset(out, split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded["id"][:] == ["0a", "0b", "1a", "1b"]


def test_the_card_tells_of_code_that_came_with_the_model(tmp_path: Path, make_job: MakeJob) -> None:
    cards = []
    for value in ("false", "true"):
        config, out = make_job(f"model.trust_remote_code={value}"), tmp_path / value
        JobStore(str(out)).finish(config, [], {})
        cards.append((out / "README.md").read_text())
    sentence = "Python code that came with the model was run (`model.trust_remote_code` is on)."
    assert [sentence in card for card in cards] == [False, True]


def test_the_readable_card_names_parts_only(tmp_path: Path, make_job: MakeJob) -> None:
    """A stray part of a worker that outlived its driver is not read."""
    config, out = make_job(), str(tmp_path / "out")
    receipt = write_part(make_task(out, 1), [make_record("a")], config, "rev", "worker-0", 1.0)
    JobStore(out).finish(config, [receipt], {})
    write_part(make_task(out, 1, attempt=9), [make_record("stray")], config, "rev", "worker-0", 1.0)
    loaded = datasets.load_dataset(out, split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded["id"][:] == ["a"]
