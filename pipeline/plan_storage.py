"""The plan as it is stored: one Parquet file, written once and read back on resume."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.inputs import InputFile
from pipeline.records import Shard
from pipeline.redaction import without_credentials
from pipeline.shards import Plan

_ROWS_PER_BATCH = 4096

_SCHEMA = pa.schema(
    [
        ("index", pa.int64()),
        ("path", pa.string()),
        ("start_row", pa.int64()),
        ("num_rows", pa.int64()),
        ("row_groups", pa.list_(pa.int64())),
        ("first_row_of_groups", pa.int64()),
        ("label", pa.string()),
        ("format", pa.string()),
        ("byte_range", pa.list_(pa.int64())),
        ("num_bytes", pa.int64()),
    ]
)


def write_plan(path: str, plan: Plan) -> bool:
    """Write a plan unless there is one; False when there is."""
    return not storage.exists(path) and storage.create_if_absent(path, encode_plan(plan))


def encode_plan(plan: Plan) -> bytes:
    columns = [pa.array([_stored(shard, field.name) for shard in plan.shards], field.type) for field in _SCHEMA]
    table = pa.Table.from_arrays(columns, schema=_SCHEMA).replace_schema_metadata(
        {
            "files": json.dumps([{**dataclasses.asdict(file), "path": _stored(file, "path")} for file in plan.files]),
            "passthrough": base64.b64encode(plan.passthrough.serialize().to_pybytes()),
        }
    )
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def _stored(entry: Shard | InputFile, name: str) -> Any:
    """A field as it is stored: addresses without credentials. A resumed job finds its input anew, by the labels."""
    value = getattr(entry, name)
    return without_credentials(value) if name == "path" else value


def read_plan(path: str) -> Plan:
    """The plan that `write_plan` wrote, of this version or an earlier one. Raises FileNotFoundError."""
    file = pq.ParquetFile(io.BytesIO(storage.read_bytes(path)))
    metadata = file.schema_arrow.metadata
    files = tuple(InputFile(**file) for file in json.loads(metadata[b"files"]))
    passthrough = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(metadata[b"passthrough"])))
    shards = tuple(_shards(file))
    return Plan(shards, files, sum(shard.num_rows for shard in shards), passthrough)


def _shards(file: pq.ParquetFile) -> Iterator[Shard]:
    """Shards of one input file share its names, as they do in a plan that was just made."""
    # No threads (`pq.read_table` starts some in any case): one that still holds a Python object when Python ends
    # aborts the process.
    for batch in file.iter_batches(_ROWS_PER_BATCH, use_threads=False):
        for row in batch.to_pylist():
            row |= {name: sys.intern(row[name]) for name in ("path", "label", "format")}
            yield Shard(**{**row, "row_groups": tuple(row["row_groups"]), "byte_range": tuple(row["byte_range"])})
