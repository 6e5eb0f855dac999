"""Makers of small inputs and messages for the tests of the pipeline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.memory import MemoryFileSystem

from pipeline.records import AcceptanceStats, PartReceipt, SampleRecord, Shard, ShardTask


def write_parquet(path: Path, columns: Mapping[str, Any], rows_per_group: int | None = None) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(dict(columns)), path, row_group_size=rows_per_group)
    return str(path)


def write_jsonl(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


STATS = AcceptanceStats(3, 8, 2, (2, 0, 1), (1, 0, 0, 0, 2), {"suffix": 2})


def make_record(uid: str, sample_index: int = 0, **changes: Any) -> SampleRecord:
    """A finished sample of five tokens in three steps."""
    fields: dict[str, Any] = {
        "id": uid,
        "sample_index": sample_index,
        "prompt": f"prompt of {uid}",
        "messages": None,
        "generation": "hello",
        "finish_reason": "length",
        "error_type": None,
        "error": None,
        "prompt_tokens": 4,
        "completion_tokens": 5,
        "stats": STATS,
        "latency_s": 0.5,
        "completion_token_ids": (1, 2, 3, 4, 5),
    }
    return SampleRecord(**{**fields, **changes})


def make_error(uid: str, sample_index: int = 0, error_type: str = "null_prompt") -> SampleRecord:
    return make_record(
        uid,
        sample_index,
        prompt=None,
        generation=None,
        finish_reason="error",
        error_type=error_type,
        error="why",
        prompt_tokens=0,
        completion_tokens=0,
        stats=AcceptanceStats(),
        latency_s=0.0,
        completion_token_ids=None,
    )


def make_task(output: str, num_rows: int = 2, index: int = 0, attempt: int = 1, **changes: Any) -> ShardTask:
    shard = Shard(index, "in.parquet", index * num_rows, num_rows)
    return ShardTask(shard, attempt, changes.pop("run_id", "run"), output, changes.pop("passthrough", pa.schema([])))


def make_receipt(index: int, path: str = "", **changes: Any) -> PartReceipt:
    fields: dict[str, Any] = {
        "shard_index": index,
        "attempt": 1,
        "path": path or f"data/part-{index:05d}-run-1.parquet",
        "num_rows": 2,
        "num_failed": 1,
        "num_bytes": 100,
        "prompt_tokens": 4,
        "completion_tokens": 5,
        "stats": STATS,
        "errors": {"null_prompt": 1},
        "seconds": 2.0,
        "worker": "worker-0",
    }
    return PartReceipt(**{**fields, **changes})


class Careless(MemoryFileSystem):
    """A store that takes a conditional put for a plain one."""

    protocol = "careless"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, value)
