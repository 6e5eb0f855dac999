"""Rows of a shard, streamed from Parquet, JSONL, CSV, OpenAI batch files and `datasets`.

A row that cannot be read is yielded as an error, never raised: a line that is no JSON object (`invalid_json`), a broken
record of CSV (`invalid_csv`), and the rest of a Parquet row group whose pages are corrupt (`unreadable_row_group`; how
many rows there are is known from the footer). A corrupt footer stops the job before it starts (see `shards.plan`).
Faults of the store raise TransientError.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.csv_rows import read_header, records, values_of
from pipeline.data_config import InputConfig
from pipeline.errors import PermanentError, RowError
from pipeline.inputs import open_dataset
from pipeline.openai_requests import flat_request
from pipeline.records import Shard

_ROWS_PER_BATCH = 256


@dataclass(frozen=True, slots=True)
class Row:
    """A row of an input file by its number there; either its values by column, or why it has none."""

    number: int
    values: Mapping[str, Any]
    error: RowError | None = None


def read_rows(shard: Shard, config: InputConfig, columns: Sequence[str]) -> Iterator[Row]:
    """The rows of a shard in file order, with those of `columns` (named as in the job) that the file has.

    Parquet is decoded from the start of the shard's first row group, page by page and only as far as needed.
    """
    if not config.columns:
        yield from _rows(shard, config, columns)
        return
    sources = {name: source for name in columns if (source := config.source_of(name)) is not None}
    for row in _rows(shard, config, list(sources.values())):
        values = {name: row.values[source] for name, source in sources.items() if source in row.values}
        yield replace(row, values=values)


def _rows(shard: Shard, config: InputConfig, columns: Sequence[str]) -> Iterator[Row]:
    """`read_rows` by the names of the file."""
    if shard.format == "parquet":
        yield from _parquet_rows(shard, columns)
    elif shard.format == "datasets":
        yield from _dataset_rows(shard, config, columns)
    elif shard.format in ("csv", "tsv"):
        yield from _csv_rows(shard, columns)
    else:
        yield from _json_rows(shard, columns)


def _parquet_rows(shard: Shard, columns: Sequence[str]) -> Iterator[Row]:
    with storage.open_input(shard.path) as source:
        try:
            file = pq.ParquetFile(source)
        except (pa.ArrowException, OSError) as error:
            raise PermanentError(
                f"{shard.path} was Parquet when the job was planned, but is not now: {error}"
            ) from error
        if max(shard.row_groups) >= file.num_row_groups:
            raise PermanentError(f"{shard.path} has lost row groups since the job was planned")
        names = [name for name in columns if name in file.schema_arrow.names]
        group_start = shard.first_row_of_groups
        for group in shard.row_groups:
            group_stop = group_start + file.metadata.row_group(group).num_rows
            start = max(shard.start_row, group_start)
            stop = min(shard.start_row + shard.num_rows, group_stop)
            yield from _group_rows(file, shard.path, group, group_start, range(start, stop), names)
            group_start = group_stop


def _group_rows(
    file: pq.ParquetFile, path: str, group: int, group_start: int, wanted: range, names: Sequence[str]
) -> Iterator[Row]:
    """The rows `wanted` (file row numbers) of one row group; those from the first corrupt page on as errors."""
    at, next_row = group_start, wanted.start
    try:
        for batch in file.iter_batches(_ROWS_PER_BATCH, row_groups=[group], columns=list(names), use_threads=False):
            if next_row < at + batch.num_rows:
                for values in batch.slice(next_row - at, wanted.stop - next_row).to_pylist():
                    yield Row(next_row, values)
                    next_row += 1
            at += batch.num_rows
            if next_row >= wanted.stop:
                return
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = f"row group {group} of {path} cannot be read: {error}"
        for number in range(next_row, wanted.stop):
            yield Row(number, {}, RowError("unreadable_row_group", reason))


def _json_rows(shard: Shard, columns: Sequence[str]) -> Iterator[Row]:
    offset, stop = shard.byte_range
    number = shard.start_row
    with storage.open_input(shard.path) as lines:
        lines.seek(offset)
        while offset < stop:
            line = lines.readline()
            if not line:
                raise PermanentError(f"{shard.path} has lost lines since the job was planned")
            offset += len(line)
            if line.strip():
                yield _json_row(number, line, shard, columns)
                number += 1


def _csv_rows(shard: Shard, columns: Sequence[str]) -> Iterator[Row]:
    start, stop = shard.byte_range
    names, _ = read_header(shard.path, shard.format, stop)
    with storage.open_input(shard.path) as lines:
        lines.seek(start)
        found = records(lines, shard.format, start)
        for number in range(shard.start_row, shard.start_row + shard.num_rows):
            record = next(found, None)
            if record is None:
                raise PermanentError(f"{shard.path} has lost lines since the job was planned")
            try:
                values = values_of(record, names)
            except RowError as error:
                yield Row(number, {}, error)
            else:
                yield Row(number, {name: values[name] for name in columns if name in values})


def _json_row(number: int, line: bytes, shard: Shard, columns: Sequence[str]) -> Row:
    try:
        values = json.loads(line)
    except ValueError as error:
        return Row(number, {}, RowError("invalid_json", f"the line is not JSON: {error}"))
    if b"\\ud" in line.lower() and not _is_unicode(values):
        return Row(number, {}, RowError("invalid_json", "the line holds half of a surrogate pair, which is no text"))
    if not isinstance(values, dict):
        return Row(number, {}, RowError("invalid_json", f"the line is not a JSON object but {type(values).__name__}"))
    if shard.format == "openai_batch":
        values = flat_request(values)
    return Row(number, {name: values[name] for name in columns if name in values})


def _is_unicode(values: object) -> bool:
    """JSON can spell code points that UTF-8, and so Arrow and tokenizers, cannot hold."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _dataset_rows(shard: Shard, config: InputConfig, columns: Sequence[str]) -> Iterator[Row]:
    dataset = open_dataset(shard.path, config)
    names = [name for name in columns if name in dataset.column_names]
    table_view = dataset.select_columns(names).with_format("arrow")
    stop = shard.start_row + shard.num_rows
    for start in range(shard.start_row, stop, _ROWS_PER_BATCH):
        batch: pa.Table = table_view[start : min(start + _ROWS_PER_BATCH, stop)]
        for i, values in enumerate(batch.to_pylist()):
            yield Row(start + i, values)
