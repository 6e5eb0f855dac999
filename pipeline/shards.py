"""The plan of a job: every input file cut into shards, the same way every time.

Only footers are read (of JSONL files the line ends), and of an id column its values. A Parquet file whose footer is
corrupt stops the job before it starts; a row group that turns out corrupt while rows are read only fails its own rows
(see `readers`). The plan is written once, as `_plan.parquet`, and read back on resume.
"""

from __future__ import annotations

import base64
import bisect
import contextlib
import dataclasses
import io
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.checks import Columns, check_columns, check_ids, check_job, column_type, passthrough_schema
from pipeline.config import InputConfig, JobConfig
from pipeline.errors import ConfigError
from pipeline.inputs import InputFile, find_inputs, open_dataset
from pipeline.readers import flat_request
from pipeline.records import Shard

_SAMPLE_ROWS = 100


@dataclass(frozen=True)
class Plan:
    """All shards in order; shard i has index i. `passthrough` are the Arrow types of `output.columns`."""

    shards: tuple[Shard, ...]
    files: tuple[InputFile, ...]
    num_rows: int
    passthrough: pa.Schema

    def __post_init__(self) -> None:
        assert [shard.index for shard in self.shards] == list(range(len(self.shards))), "shards are out of order"
        assert sum(shard.num_rows for shard in self.shards) == self.num_rows, self.num_rows


def plan(config: JobConfig, files: Sequence[InputFile] | None = None) -> Plan:
    """Cut the input into shards of `output.rows_per_shard` rows, at most; a shard never crosses files.

    Raises ConfigError, in one sentence, for whatever in the input makes the job impossible.
    """
    check_job(config)
    files = tuple(find_inputs(config.input) if files is None else files)
    left = sys.maxsize if config.input.limit is None else config.input.limit
    shards: list[Shard] = []
    spans: list[tuple[Shard, Columns]] = []
    for file in files:
        columns, cut = _cut(file, config, left)
        if cut:
            check_columns(config, columns, file.path)
            spans.append((_span(cut), columns))
            shards += cut
            left -= sum(shard.num_rows for shard in cut)
    if not shards:
        raise ConfigError(
            f"input.path must hold at least one row, got none in {', '.join(file.path for file in files)}"
        )
    check_ids(config, [span for span, _ in spans])
    numbered = tuple(replace(shard, index=i) for i, shard in enumerate(shards))
    return Plan(numbered, files, sum(shard.num_rows for shard in shards), passthrough_schema(config, spans))


def write_plan(path: str, plan: Plan) -> bool:
    """Write a plan unless there is one; False when there is."""
    rows = [dataclasses.asdict(shard) for shard in plan.shards]
    table = pa.Table.from_pylist(rows, schema=_PLAN_SCHEMA).replace_schema_metadata(
        {
            "files": json.dumps([dataclasses.asdict(file) for file in plan.files]),
            "passthrough": base64.b64encode(plan.passthrough.serialize().to_pybytes()),
        }
    )
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return storage.create_if_absent(path, buffer.getvalue())


def read_plan(path: str) -> Plan:
    """The plan that `write_plan` wrote. Raises FileNotFoundError."""
    # No threads (`pq.read_table` starts some in any case): one that still holds a Python object when Python ends
    # aborts the process.
    table = pq.ParquetFile(io.BytesIO(storage.read_bytes(path))).read(use_threads=False)
    metadata = table.schema.metadata
    shards = tuple(_shard(row) for row in table.to_pylist())
    files = tuple(InputFile(**file) for file in json.loads(metadata[b"files"]))
    passthrough = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(metadata[b"passthrough"])))
    return Plan(shards, files, sum(shard.num_rows for shard in shards), passthrough)


_PLAN_SCHEMA = pa.schema(
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
    ]
)


def _shard(row: dict[str, Any]) -> Shard:
    return Shard(**{**row, "row_groups": tuple(row["row_groups"]), "byte_range": tuple(row["byte_range"])})


def _cut(file: InputFile, config: JobConfig, limit: int) -> tuple[Columns, list[Shard]]:
    """The columns of one file and its shards, not numbered yet, of the first `limit` rows."""
    size = config.output.rows_per_shard
    if file.format == "parquet":
        return _cut_parquet(file, size, limit)
    if file.format == "datasets":
        return _cut_dataset(file, config.input, size, limit)
    return _cut_json(file, size, limit)


def _cut_parquet(file: InputFile, size: int, limit: int) -> tuple[Columns, list[Shard]]:
    """Shards by row count; each names the row groups that it overlaps.

    Worked example: row groups of 3, 3 and 2 rows in shards of 4 give rows 0-3 of groups (0, 1) and rows 4-7 of groups
    (1, 2), whose first row of groups is 3.
    """
    try:
        with storage.open_input(file.path) as source:
            footer = pq.ParquetFile(source)
            schema, metadata = footer.schema_arrow, footer.metadata
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"input.path must name readable Parquet files, got {file.path!r}: {error}") from error
    starts = [0]
    for group in range(metadata.num_row_groups):
        starts.append(starts[-1] + metadata.row_group(group).num_rows)
    shards = []
    for start, num_rows in _ranges(min(metadata.num_rows, limit), size):
        first = bisect.bisect_right(starts, start) - 1
        stop = bisect.bisect_left(starts, start + num_rows)
        groups = tuple(group for group in range(first, stop) if starts[group] < starts[group + 1])
        shards.append(_shard_of(file, start, num_rows, row_groups=groups, first_row_of_groups=starts[groups[0]]))
    return {field.name: field.type for field in schema}, shards


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
    shards = [
        _shard_of(file, start, stop - start, byte_range=(begin, end))
        for (start, begin), (stop, end) in itertools.pairwise(ends)
    ]
    return _sampled_columns(sample, file), shards


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


def _span(shards: Sequence[Shard]) -> Shard:
    """One shard that covers consecutive shards of a file."""
    groups = sorted({group for shard in shards for group in shard.row_groups})
    return replace(
        shards[0],
        num_rows=sum(shard.num_rows for shard in shards),
        row_groups=tuple(groups),
        byte_range=(shards[0].byte_range[0], shards[-1].byte_range[1]),
    )
