from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pipeline import faults, storage
from pipeline.config import JobConfig
from pipeline.config_io import parse_job
from pipeline.errors import PermanentError, TransientError
from pipeline.readers import read_rows
from pipeline.shards import plan
from tests.pipeline.makers import write_jsonl, write_parquet


def job(path: str, rows_per_shard: int = 3, **options: object) -> JobConfig:
    output = {"path": "out", "rows_per_shard": rows_per_shard}
    return parse_job({"model": "m", "input": {"path": path, **options}, "output": output})


def rows_by_shard(config: JobConfig, *columns: str) -> list[list[tuple[int, object]]]:
    return [
        [
            (row.number, row.error.error_type if row.error else row.values)
            for row in read_rows(shard, config.input, columns)
        ]
        for shard in plan(config).shards
    ]


@pytest.mark.parametrize("rows_per_shard", [1, 2, 3, 4, 7, 10, 100])
@pytest.mark.parametrize("rows_per_group", [1, 3, 4, 100])
def test_parquet_shards_cover_every_row_once(tmp_path: Path, rows_per_shard: int, rows_per_group: int) -> None:
    columns = {"text": [f"t{i}" for i in range(10)], "n": list(range(10))}
    path = write_parquet(tmp_path / "a.parquet", columns, rows_per_group)
    shards = rows_by_shard(job(path, rows_per_shard), "n")
    assert [row for shard in shards for row in shard] == [(i, {"n": i}) for i in range(10)]
    assert [len(shard) for shard in shards[:-1]] == [rows_per_shard] * (len(shards) - 1)


@pytest.mark.parametrize("rows_per_shard", [1, 2, 3, 100])
def test_jsonl_shards_cover_every_row_once(tmp_path: Path, rows_per_shard: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "ü"}\n  \n{"text": "c", "x": 1}\n{"text": "d"}')
    shards = rows_by_shard(job(str(path), rows_per_shard), "text")
    assert [row for shard in shards for row in shard] == [(i, {"text": text}) for i, text in enumerate("aücd")]


def test_broken_lines_become_error_rows(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "a.jsonl", [{"text": "a"}, "{oops", [1], '{"text": "\\ud800"}', '{"text": "\\ud83d\\ude00"}']
    )
    (shard,) = rows_by_shard(job(path, 10), "text")
    bad = "invalid_json"
    assert shard == [(0, {"text": "a"}), (1, bad), (2, bad), (3, bad), (4, {"text": "\U0001f600"})]


def test_openai_batch_lines_are_flattened(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "x", "messages": messages}
    path = write_jsonl(tmp_path / "a.jsonl", [{"custom_id": "r1", "method": "POST", "url": "/v1", "body": body}])
    ((row,),) = rows_by_shard(job(path), "custom_id", "messages", "model")
    assert row == (0, {"custom_id": "r1", "messages": messages, "model": "x"})


def test_datasets_are_read_by_row_range(tmp_path: Path) -> None:
    whole = datasets.Dataset.from_dict({"text": [f"t{i}" for i in range(7)], "n": list(range(7))})
    whole.select([6, 0, 1, 2, 3]).save_to_disk(tmp_path / "saved")
    shards = rows_by_shard(job(str(tmp_path / "saved")), "n")
    assert [[values["n"] for _, values in shard] for shard in shards] == [[6, 0, 1], [2, 3]]  # type: ignore[index]


def corrupt_group(path: str, group: int, column: int = 0) -> None:
    """Overwrite the data pages of one column of one row group."""
    chunk = pq.ParquetFile(path).metadata.row_group(group).column(column)
    data = bytearray(Path(path).read_bytes())
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    data[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    Path(path).write_bytes(data)


def test_a_corrupt_row_group_fails_its_own_rows_only(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": [f"t{i}" for i in range(9)]}, rows_per_group=3)
    corrupt_group(path, 1)
    config = job(path, 4)
    kinds = [kind for shard in rows_by_shard(config, "text") for _, kind in shard]
    assert [kind if isinstance(kind, str) else "ok" for kind in kinds] == ["ok"] * 3 + ["unreadable_row_group"] * 3 + [
        "ok"
    ] * 3
    errors = [
        row.error for shard in plan(config).shards for row in read_rows(shard, config.input, ["text"]) if row.error
    ]
    assert str(errors[0]).startswith(f"row group 1 of {path} cannot be read: ")


def test_a_file_that_changed_since_the_plan_is_permanent(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": ["a"] * 6}, rows_per_group=3)
    config = job(path)
    shards = plan(config).shards
    write_parquet(tmp_path / "a.parquet", {"text": ["a"] * 3}, rows_per_group=3)
    with pytest.raises(PermanentError, match="has lost row groups since the job was planned"):
        list(read_rows(shards[1], config.input, ["text"]))
    Path(path).write_bytes(b"no longer")
    with pytest.raises(PermanentError, match="was Parquet when the job was planned"):
        list(read_rows(shards[0], config.input, ["text"]))


class Flaky(MemoryFileSystem):
    """A store whose connection can be cut while a file is open."""

    protocol = "flaky"
    store: dict[str, Any] = {}  # noqa: RUF012
    is_cut = False
    fails_each = 0
    reads = failed = 0

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        class Connection(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                Flaky.reads += 1
                if Flaky.is_cut or (Flaky.fails_each and Flaky.reads % Flaky.fails_each == 0):
                    Flaky.failed += 1
                    self.close()
                    raise ConnectionResetError("connection reset by peer")
                return super().read(size)

        file = super()._open(path, mode, **kwargs)
        return Connection(file.getvalue()) if mode == "rb" else file


def test_faults_of_the_store_are_no_bad_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is cut after the footer was read: a TransientError, all the way through Parquet's reader."""
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    texts = [os.urandom(100_000).hex() for _ in range(9)]  # more than any buffer holds, and not compressible
    local = write_parquet(tmp_path / "a.parquet", {"text": texts}, rows_per_group=3)
    storage.write_bytes("flaky://a.parquet", Path(local).read_bytes())
    config = job("flaky://a.parquet", 9)
    (shard,) = plan(config).shards
    rows = read_rows(shard, config.input, ["text"])
    assert next(rows).number == 0
    monkeypatch.setattr(Flaky, "is_cut", True)
    monkeypatch.setattr(faults, "PATIENCE_S", 0.0)
    with pytest.raises(TransientError, match=r"storage fault at .*: connection reset by peer"):
        list(rows)


def test_reading_goes_on_where_it_was_when_a_fault_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third read fails, on a connection that is good for nothing any more; the rows are those of the file."""
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    monkeypatch.setattr(faults, "FIRST_PAUSE_S", 0.001)
    texts = [os.urandom(100_000).hex() for _ in range(9)]
    local = write_parquet(tmp_path / "a.parquet", {"text": texts}, rows_per_group=3)
    lines = write_jsonl(tmp_path / "b.jsonl", [{"text": text} for text in texts])
    for name in (local, lines):
        storage.write_bytes(f"flaky://{Path(name).name}", Path(name).read_bytes())
    for name in ("a.parquet", "b.jsonl"):
        config = job(f"flaky://{name}", 4)
        shards = plan(config).shards
        monkeypatch.setattr(Flaky, "fails_each", 3)
        found = [row.values["text"] for shard in shards for row in read_rows(shard, config.input, ["text"])]
        assert found == texts
        monkeypatch.setattr(Flaky, "fails_each", 0)
    assert Flaky.failed > 5


def test_a_file_that_changes_while_it_is_read_is_no_longer_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    storage.write_bytes("flaky://c", b"x" * 2**20)
    with storage.open_input("flaky://c") as file:
        assert file.read(5) == b"xxxxx"
        storage.write_bytes("flaky://c", b"y" * 2**19)
        monkeypatch.setattr(Flaky, "is_cut", True)
        monkeypatch.setattr(faults, "PATIENCE_S", 0.0)
        file.seek(2**19)
        with pytest.raises(TransientError):
            file.read(2**19)
        monkeypatch.setattr(Flaky, "is_cut", False)
        with pytest.raises(PermanentError, match=r"^flaky://c has changed while it was read$"):
            file.read(5)
