from __future__ import annotations

import io
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import storage
from pipeline.config import JobConfig
from pipeline.errors import ConfigError
from pipeline.parts import read_part_rows, write_part
from pipeline.records import AcceptanceStats
from pipeline.schema import OUTPUT_COLUMNS, output_schema, stats_of
from tests.pipeline.conftest import MakeJob
from tests.pipeline.makers import STATS, make_error, make_record, make_task

EXTRAS = {"path": "out", "extras": ["prompt_ids", "token_ids", "logprobs", "topk", "cdf"]}
NOTHING = pa.schema([])


def written(job: JobConfig, root: str, **options: Any) -> pa.Table:
    """A part of two rows, one of them failed, as Parquet gives it back."""
    task = make_task(root, 2, **options)
    passthrough = {"passthrough": dict.fromkeys(task.passthrough.names)}
    receipt = write_part(task, [make_record("a", **passthrough), make_error("b")], job, "rev", "worker-0", 2.0)
    return pq.read_table(io.BytesIO(storage.read_bytes(storage.join(root, receipt.path))))


def test_a_part_is_what_its_receipt_says(root: str, make_job: MakeJob) -> None:
    task = make_task(root, 2, index=7, attempt=3)
    records = [make_record("a"), make_error("b")]
    receipt = write_part(task, records, make_job(), "rev", "worker-0", 2.0, {"vocab_size": "320"})
    assert receipt.path == "data/part-00007-run-3.parquet"
    data = storage.read_bytes(storage.join(root, receipt.path))
    table = pq.read_table(io.BytesIO(data))
    assert (receipt.num_rows, receipt.num_failed, receipt.num_bytes) == (table.num_rows, 1, len(data))
    assert (receipt.prompt_tokens, receipt.completion_tokens, receipt.stats) == (4, 5, STATS)
    assert (receipt.shard_index, receipt.attempt, receipt.worker, receipt.seconds) == (7, 3, "worker-0", 2.0)
    assert receipt.errors == {"null_prompt": 1}
    assert table["id"].to_pylist() == ["a", "b"]
    assert table["finish_reason"].to_pylist() == ["length", "error"]
    assert table["completion_token_ids"].to_pylist() == [[1, 2, 3, 4, 5], None]
    assert [stats_of(row) for row in table.to_pylist()] == [STATS, AcceptanceStats()]
    metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items() if b"sevenleague" in key}
    assert metadata == {
        "sevenleague.model": "tiny",
        "sevenleague.model_revision": "rev",
        "sevenleague.coupling": "gumbel",
        "sevenleague.k": "0",
        "sevenleague.shard": "7",
        "sevenleague.vocab_size": "320",
    }


def test_all_parts_have_the_same_schema(root: str, make_job: MakeJob) -> None:
    job = make_job()
    odd = pa.schema([("day", pa.date32()), ("tags", pa.list_(pa.dictionary(pa.int8(), pa.string())))])
    first = written(job, root, index=0, passthrough=odd).schema
    task = make_task(root, 1, index=1, passthrough=odd)
    receipt = write_part(task, [make_error("x")], job, "rev", "worker-0", 1.0)
    second = pq.read_schema(io.BytesIO(storage.read_bytes(storage.join(root, receipt.path))))
    assert first.equals(second)
    assert first.names[-2:] == ["day", "tags"]


def test_columns_follow_the_extras(make_job: MakeJob) -> None:
    job = make_job("sampling.coupling=inverse_cdf", "sampling.logprobs=2", "output.trace=true", output=EXTRAS)
    schema = output_schema(job, NOTHING)
    assert set(schema.names) == OUTPUT_COLUMNS
    assert schema.field("topk_token_ids").type == pa.list_(pa.list_(pa.int32()))
    assert schema.field("cdf_low").type == pa.list_(pa.float64())
    plain = output_schema(make_job(output={"path": "out", "extras": []}), NOTHING)
    assert OUTPUT_COLUMNS - set(plain.names) == {
        "prompt_token_ids",
        "completion_token_ids",
        "token_logprobs",
        "topk_token_ids",
        "topk_logprobs",
        "cdf_low",
        "cdf_high",
        "draft_spans",
    }


def test_extras_round_trip(root: str, make_job: MakeJob) -> None:
    job = make_job("sampling.coupling=inverse_cdf", "sampling.logprobs=2", output=EXTRAS)
    extras = {
        "token_logprobs": (-0.5,) * 5,
        "topk_token_ids": ((1, 2),) * 5,
        "topk_logprobs": ((-0.5, -1.5),) * 5,
        "cdf_low": (0.1,) * 5,
        "cdf_high": (0.7,) * 5,
    }
    receipt = write_part(make_task(root, 1), [make_record("a", **extras)], job, "rev", "worker-0", 1.0)
    (row,) = read_part_rows(storage.join(root, receipt.path), [])
    assert {name: row[name] for name in ("cdf_low", "cdf_high")} == {"cdf_low": [0.1] * 5, "cdf_high": [0.7] * 5}
    assert row["topk_token_ids"] == [[1, 2]] * 5
    assert row["topk_logprobs"] == [[-0.5, -1.5]] * 5


def test_messages_and_prompt_are_one_of_two(root: str, make_job: MakeJob) -> None:
    messages = ({"role": "user", "content": "hi"},)
    records = [make_record("a"), make_record("b", prompt=None, messages=messages)]
    receipt = write_part(make_task(root, 2), records, make_job(), "rev", "worker-0", 1.0)
    rows = list(read_part_rows(storage.join(root, receipt.path), ["prompt", "messages"]))
    assert rows == [{"prompt": "prompt of a", "messages": None}, {"prompt": None, "messages": list(messages)}]


def test_datasets_can_read_parts(tmp_path: Any, make_job: MakeJob) -> None:
    written(make_job(), str(tmp_path))
    files = str(tmp_path / "data" / "*.parquet")
    loaded = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded["id"][:] == ["a", "b"]
    assert loaded[0]["accepted_by_drafter"] == [{"drafter": "suffix", "accepted": 2}]


def test_a_part_with_rows_missing_is_never_written(root: str, make_job: MakeJob) -> None:
    for records in ([make_record("a")], [make_record("a"), make_record("a", 1)]):
        with pytest.raises(AssertionError):
            write_part(make_task(root, 2), records, make_job(), "rev", "worker-0", 1.0)
    bad = [make_record("a", passthrough={"n": "no number"}), make_record("b", passthrough={"n": 1})]
    with pytest.raises((pa.ArrowInvalid, pa.ArrowTypeError)):
        write_part(
            make_task(root, 2, passthrough=pa.schema([("n", pa.int64())])), bad, make_job(), "rev", "worker-0", 1.0
        )
    assert storage.list_names(storage.join(root, "data")) == []


def test_samples_of_a_prompt_stay_together(root: str, make_job: MakeJob) -> None:
    records = [make_record(uid, i) for uid in "ab" for i in range(3)]
    job = make_job("sampling.n=3")
    receipt = write_part(make_task(root, 2), records, job, "rev", "worker-0", 1.0)
    assert receipt.num_rows == 6
    rows = read_part_rows(storage.join(root, receipt.path), ["id", "sample_index"])
    assert [(row["id"], row["sample_index"]) for row in rows] == [(uid, i) for uid in "ab" for i in range(3)]


def test_a_copied_column_may_not_take_a_name_of_ours(make_job: MakeJob) -> None:
    from pipeline.checks import check_job

    with pytest.raises(ConfigError, match=r"output.columns must not name columns that every output has, got 'cdf_low'"):
        check_job(make_job("output.columns=[task, cdf_low]"))
