"""The files of a data set: for each split a row of Parquet or JSONL files, each made in memory and written whole."""

from __future__ import annotations

import base64
import io
import json
import math
from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.exporting.options import FileFormat

_ROW_GROUP_BYTES = 4 * 1024 * 1024
_JSON_ROWS = 64


class SplitFiles:
    """The files of one split: `data/train-00000.parquet`, .. `rows` and `num_bytes` count what was added and written.

    `column_bytes` is what the columns of Parquet files take in them, compressed.
    """

    def __init__(self, dest: str, split: str, file_format: FileFormat, file_mb: int) -> None:
        self.split = split
        self.rows = self.num_bytes = 0
        self.names: list[str] = []
        self.column_bytes: Counter[str] = Counter()
        self._dest = dest
        self._file_format = file_format
        self._limit = file_mb * 1024 * 1024
        self._buffer = io.BytesIO()
        self._writer: pq.ParquetWriter | None = None
        self._waiting: list[pa.Table] = []

    def add(self, table: pa.Table) -> None:
        if table.num_rows == 0:
            return
        self.rows += table.num_rows
        if self._file_format == "jsonl":
            for batch in table.to_batches(_JSON_ROWS):
                for row in batch.to_pylist():
                    self._buffer.write(json_line(row))
        else:
            self._waiting.append(table)
            if sum(waiting.nbytes for waiting in self._waiting) >= _ROW_GROUP_BYTES:
                self._write_row_group()
        if self._buffer.tell() >= self._limit:
            self._finish_file()

    def close(self) -> None:
        """Write what is left."""
        if self._waiting:
            self._write_row_group()
        if self._buffer.tell():
            self._finish_file()

    def _write_row_group(self) -> None:
        table = pa.concat_tables(self._waiting)
        self._waiting = []
        if self._writer is None:
            # No dictionaries: for log-probabilities they take 40 MB more memory, and more bytes.
            self._writer = pq.ParquetWriter(self._buffer, table.schema, compression="zstd", use_dictionary=False)
        self._writer.write_table(table)

    def _finish_file(self) -> None:
        if self._waiting:
            self._write_row_group()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        name = f"data/{self.split}-{len(self.names):05d}.{self._file_format}"
        data = self._buffer.getvalue()
        self._buffer = io.BytesIO()
        if self._file_format == "parquet":
            self._count_columns(data)
        storage.write_bytes(storage.join(self._dest, name), data)
        self.names.append(name)
        self.num_bytes += len(data)
        del data
        pa.default_memory_pool().release_unused()  # else pieces of freed memory add up, from file to file

    def _count_columns(self, data: bytes) -> None:
        metadata = pq.read_metadata(pa.BufferReader(data))
        for group in range(metadata.num_row_groups):
            for column in range(metadata.num_columns):
                chunk = metadata.row_group(group).column(column)
                self.column_bytes[chunk.path_in_schema.partition(".")[0]] += chunk.total_compressed_size


def json_line(row: dict[str, Any]) -> bytes:
    """One row as a line of JSON. What JSON has no word for: bytes as base64, dates as ISO text, NaN and inf as null."""
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False, default=_as_text)
    except ValueError:
        text = json.dumps(_finite(row), ensure_ascii=False, default=_as_text)
    return text.encode() + b"\n"


def _as_text(value: Any) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
