"""Failed rows done again: the output stays whole at every moment, whatever dies in between."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline import storage
from pipeline.commits import JobStore
from pipeline.config import JobConfig
from pipeline.errors import PermanentError
from pipeline.parts import read_part_rows, write_part
from pipeline.preparation import Prepared, RetryFailed, prepare
from pipeline.records import PartReceipt, Redo, RetryRound, SampleRecord, ShardTask
from pipeline.redo import StandingPart, prompts_of
from pipeline.summary import status_of, summarise
from tests.pipeline.conftest import MakeJob
from tests.pipeline.makers import make_error, make_record, write_parquet

TEXTS = ["a", "bad", "b", "c", "odd", "bad", "d"]
ERRORS = {"bad": "bad", "odd": "odd"}


class Death(BaseException):
    """The end of the process."""


class Mortal:
    """Counts the operations that change storage and dies in the nth, before or after it is done."""

    def __init__(self, patch: pytest.MonkeyPatch, dies_at: int, is_done: bool) -> None:
        self.count, self.dies_at, self.is_done = 0, dies_at, is_done
        for name in ("write_bytes", "create_if_absent", "delete"):
            patch.setattr(storage, name, self.mortal(getattr(storage, name)))

    def mortal(self, operation: Any) -> Any:
        def perform(*arguments: Any) -> Any:
            self.count += 1
            dies = self.count == self.dies_at
            if dies and not self.is_done:
                raise Death
            result = operation(*arguments)
            if dies:
                raise Death
            return result

        return perform


def drive(config: JobConfig, wish: RetryFailed | None, mended: bool) -> Prepared:
    """What driver and workers do, without Ray."""
    prepared = prepare(config, wish)
    store, receipts = JobStore(prepared.config.output.path), prepared.settled
    store.create_or_resume(prepared.config, prepared.plan, "rev", prepared.retry)
    for shard in prepared.remaining:
        redo = prepared.redo.get(shard.index)
        task = ShardTask(shard, 1, uuid.uuid4().hex[:8], store.output, prepared.plan.passthrough, redo=redo)
        records = [answer(prompt.uid, prompt.prompt or "", mended) for prompt in prompts_of(task, prepared.config)]
        receipt = write_part(task, records, prepared.config, "rev", "worker-0", 1.0)
        receipts[shard.index] = store.commit(receipt)
    summary = summarise(receipts.values(), prepared.plan, prepared.config, "done")
    store.finish(prepared.config, receipts.values(), summary.metrics())
    return prepared


def answer(uid: str, text: str, mended: bool) -> SampleRecord:
    if text in ERRORS and not mended:
        return make_error(uid, error_type=ERRORS[text])
    return make_record(uid, prompt=text, generation=f"{text} {'again' if mended else 'first'}")


def read(output: str) -> list[str]:
    """Generations, or error types, in order: what a reader of the manifest sees."""
    manifest = json.loads(storage.read_bytes(storage.join(output, "_manifest.json")))
    rows = [row for part in manifest["parts"] for row in read_part_rows(storage.join(output, part["path"]), [])]
    assert [row["id"] for row in rows] == [f"in.parquet:{i}" for i in range(len(TEXTS))]
    return [row["generation"] or row["error_type"] for row in rows]


FIRST = ["a first", "bad", "b first", "c first", "odd", "bad", "d first"]
AGAIN = ["a first", "bad again", "b first", "c first", "odd again", "bad again", "d first"]


@pytest.fixture
def config(tmp_path: Path, make_job: MakeJob) -> JobConfig:
    write_parquet(tmp_path / "in.parquet", {"text": TEXTS})
    return make_job("output.rows_per_shard=2")


def test_failed_rows_of_one_type_and_then_all(config: JobConfig) -> None:
    output = config.output.path
    drive(config, None, mended=False)
    assert read(output) == FIRST
    prepared = drive(config, RetryFailed("odd"), mended=True)
    assert list(prepared.redo) == [2]
    assert read(output) == [*FIRST[:4], "odd again", *FIRST[5:]]
    assert list(drive(config, RetryFailed(), mended=False).redo) == [0, 2]
    assert read(output) == [*FIRST[:4], "odd again", *FIRST[5:]], "the same rows failed again"
    assert drive(config, RetryFailed(), mended=True).retry == RetryRound(3)
    assert read(output) == AGAIN
    assert drive(config, RetryFailed(), mended=True).remaining == []
    status = status_of(output)
    assert (status.state, status.rows_ok, status.rows_failed, status.shards_committed) == ("done", 7, 0, 4)
    assert len(storage.list_names(storage.join(output, "data"))) == 4


@pytest.mark.parametrize("is_done", [False, True])
def test_whatever_dies_the_output_is_whole(config: JobConfig, monkeypatch: pytest.MonkeyPatch, is_done: bool) -> None:
    """Death at every single step of a retry; a reader of the manifest always sees every row once."""
    dies_at = 0
    while True:
        dies_at += 1
        output = f"memory://{uuid.uuid4().hex}"
        config = config.model_copy(update={"output": config.output.model_copy(update={"path": output})})
        drive(config, None, mended=False)
        with monkeypatch.context() as patch:
            Mortal(patch, dies_at, is_done)
            try:
                drive(config, RetryFailed(), mended=True)
                break
            except Death:
                pass
        seen = read(output)
        assert all(row in (first, again) for row, first, again in zip(seen, FIRST, AGAIN, strict=True))
        assert status_of(output).state != "done" or seen in (FIRST, AGAIN)
        if dies_at % 3 == 0:  # the same command without the flag ends what was begun, with what there is
            drive(config, None, mended=True)
            assert all(row in (first, again) for row, first, again in zip(read(output), FIRST, AGAIN, strict=True))
            assert status_of(output).state == "done"
        drive(config, RetryFailed(), mended=True)
        assert read(output) == AGAIN
        assert status_of(output).state == "done"
        assert JobStore(output).retry_round() is None
        assert len(storage.list_names(storage.join(output, "data"))) == 4
    assert dies_at > 15


def test_a_round_that_was_begun_is_gone_on_with(config: JobConfig) -> None:
    """Shards that failed again in this round are not done a third time; another type is another round."""
    drive(config, None, mended=False)
    prepared = prepare(config, RetryFailed())
    store = JobStore(config.output.path)
    store.create_or_resume(prepared.config, prepared.plan, "rev", prepared.retry)
    assert status_of(store.output).state == "planned"
    task = ShardTask(
        prepared.plan.shards[0], 1, "other", store.output, prepared.plan.passthrough, redo=prepared.redo[0]
    )
    records = [answer(prompt.uid, prompt.prompt or "", False) for prompt in prompts_of(task, prepared.config)]
    store.commit(write_part(task, records, prepared.config, "rev", "worker-0", 1.0))
    assert prepare(config, RetryFailed()).retry == RetryRound(1)
    assert list(prepare(config, RetryFailed()).redo) == [2]
    assert prepare(config, RetryFailed("bad")).retry == RetryRound(2, "bad")
    assert list(prepare(config, RetryFailed("bad")).redo) == [0, 2]
    assert prepare(config).remaining == []


def test_a_part_of_old_and_new_rows() -> None:
    old = pa.table({"x": [0, 1, 2, 3, 4, 5]})
    one, two = StandingPart(old, 2, frozenset({1})), StandingPart(old, 1, frozenset({0, 5}))
    assert one.merged(pa.table({"x": [20, 30]}))["x"].to_pylist() == [0, 1, 20, 30, 4, 5]
    assert two.merged(pa.table({"x": [9, 8]}))["x"].to_pylist() == [9, 1, 2, 3, 4, 8]


def test_a_part_that_lost_rows_is_not_merged(config: JobConfig) -> None:
    prepared = drive(config, None, mended=False)
    receipt: PartReceipt = JobStore(config.output.path).committed()[3]
    task = ShardTask(
        prepared.plan.shards[0], 1, "run", config.output.path, prepared.plan.passthrough, redo=Redo(receipt.path, 1)
    )
    with pytest.raises(PermanentError, match="must hold 2 rows, it has 1"):
        list(prompts_of(task, prepared.config))
