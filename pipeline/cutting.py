"""One input file cut into shards, from its footer, or of JSONL and CSV files from its line ends."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.checks import Columns, column_type
from pipeline.config import JobConfig
from pipeline.csv_rows import read_header, records
from pipeline.data_config import InputConfig
from pipeline.errors import ConfigError
from pipeline.inputs import InputFile, open_dataset
from pipeline.openai_requests import flat_request
from pipeline.records import Shard

_SAMPLE_ROWS = 100
_TAIL_BYTES = 64 * 1024
"""Read of a Parquet file at first; most footers are shorter."""
_TRAILER_BYTES = 8


@dataclass(frozen=True, slots=True)
class CutFile:
    """What planning keeps of a file: its columns and its shards, not numbered yet."""

    file: InputFile
    columns: Columns
    shards: list[Shard]


def cut(file: InputFile, config: JobConfig, limit: int) -> CutFile:
    """The columns of one file and the shards of its first `limit` rows."""
    size = config.output.rows_per_shard
    if file.format == "parquet":
        columns, shards = _cut_parquet(file, size, limit)
    elif file.format == "datasets":
        columns, shards = _cut_dataset(file, config.input, size, limit)
    elif file.format in ("csv", "tsv"):
        columns, shards = _cut_csv(file, size, limit)
    else:
        columns, shards = _cut_json(file, size, limit)
    return CutFile(file, _renamed(columns, config.input, file.path) if shards else columns, shards)


def _renamed(columns: Columns, config: InputConfig, path: str) -> Columns:
    """The columns under the names that the job has for them."""
    absent = next((name for name in config.columns if name not in columns), None)
    if absent is not None:
        raise ConfigError(
            f"input.columns must rename columns of the input, got {absent!r} for file {path!r} (its columns: "
            f"{', '.join(columns)})"
        )
    names = [config.columns.get(name, name) for name in columns]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"input.columns must leave columns with different names, got {twice!r} twice in {path!r}")
    return dict(zip(names, columns.values(), strict=True))


def _cut_parquet(file: InputFile, size: int, limit: int) -> tuple[Columns, list[Shard]]:
    """Shards by row count; each names the row groups that it overlaps.

    Worked example: row groups of 3, 3 and 2 rows in shards of 4 give rows 0-3 of groups (0, 1) and rows 4-7 of groups
    (1, 2), whose first row of groups is 3. The first of them is as large as group 0 and a third of group 1.
    """
    footer = _footer(file)
    groups = [footer.row_group(index) for index in range(footer.num_row_groups)]
    starts = [0, *itertools.accumulate(group.num_rows for group in groups)]
    sizes = [group.total_byte_size for group in groups]
    shards = []
    for start, num_rows in _ranges(min(footer.num_rows, limit), size):
        first = bisect.bisect_right(starts, start) - 1
        stop = bisect.bisect_left(starts, start + num_rows)
        overlapped = tuple(group for group in range(first, stop) if starts[group] < starts[group + 1])
        num_bytes = sum(
            sizes[group]
            * (min(start + num_rows, starts[group + 1]) - max(start, starts[group]))
            // (starts[group + 1] - starts[group])
            for group in overlapped
        )
        first_row = starts[overlapped[0]]
        where = {"row_groups": overlapped, "first_row_of_groups": first_row, "num_bytes": num_bytes}
        shards.append(_shard_of(file, start, num_rows, **where))
    return {field.name: field.type for field in footer.schema.to_arrow_schema()}, shards


def _footer(file: InputFile) -> pq.FileMetaData:
    """The footer, from the last bytes of the file: one request in most cases. Arrow takes them for a whole file."""
    try:
        tail = storage.read_range(file.path, max(file.size - _TAIL_BYTES, 0), file.size)
        needed = int.from_bytes(tail[-_TRAILER_BYTES:-4], "little") + _TRAILER_BYTES
        if len(tail) < needed <= file.size:
            tail = storage.read_range(file.path, file.size - needed, file.size)
        return pq.read_metadata(pa.BufferReader(tail))
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"input.path must name readable Parquet files, got {file.path!r}: {error}") from error


def _cut_dataset(file: InputFile, config: InputConfig, size: int, limit: int) -> tuple[Columns, list[Shard]]:
    dataset = open_dataset(file.path, config)
    columns = {field.name: field.type for field in dataset.features.arrow_schema}
    return columns, [_shard_of(file, start, rows) for start, rows in _ranges(min(len(dataset), limit), size)]


def _cut_json(file: InputFile, size: int, limit: int) -> tuple[Columns, list[Shard]]:
    """Shards of `size` lines that are not blank, cut at line ends; the row number counts those lines."""
    ends: list[tuple[int, int]] = [(0, 0)]
    sample: list[bytes] = []
    rows = offset = 0
    with storage.open_input(file.path) as lines:
        while rows < limit and (line := lines.readline()):
            offset += len(line)
            if line.strip():
                rows += 1
                if len(sample) < _SAMPLE_ROWS:
                    sample.append(line)
                if rows % size == 0:
                    ends.append((rows, offset))
    if rows > ends[-1][0]:
        ends.append((rows, offset))
    return _sampled_columns(sample, file), _byte_shards(file, ends)


def _cut_csv(file: InputFile, size: int, limit: int) -> tuple[Columns, list[Shard]]:
    """Shards of `size` records, cut where records end: a quoted field may hold line ends."""
    names, offset = read_header(file.path, file.format, file.size)
    ends = [(0, offset)]
    rows = 0
    with storage.open_input(file.path) as lines:
        lines.seek(offset)
        for record in itertools.islice(records(lines, file.format, offset), limit):
            rows, offset = rows + 1, record.stop
            if rows % size == 0:
                ends.append((rows, offset))
    if rows > ends[-1][0]:
        ends.append((rows, offset))
    return dict.fromkeys(names, pa.string()), _byte_shards(file, ends)


def _byte_shards(file: InputFile, ends: Sequence[tuple[int, int]]) -> list[Shard]:
    """Shards between neighbouring (rows so far, byte) pairs."""
    return [
        _shard_of(file, start, stop - start, byte_range=(begin, end), num_bytes=end - begin)
        for (start, begin), (stop, end) in itertools.pairwise(ends)
    ]


def _sampled_columns(lines: Sequence[bytes], file: InputFile) -> Columns:
    """The columns of JSONL rows, as far as a sample of its lines shows them; lines that are broken show nothing."""
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(flat_request(row) if file.format == "openai_batch" else row)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: column_type([row.get(name) for row in rows]) for name in names}


def _ranges(num_rows: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, length): `_ranges(5, 2)` gives (0, 2), (2, 2), (4, 1)."""
    for start in range(0, num_rows, size):
        yield start, min(size, num_rows - start)


def _shard_of(file: InputFile, start: int, num_rows: int, **where: Any) -> Shard:
    return Shard(0, file.path, start, num_rows, label=file.label, format=file.format, **where)
