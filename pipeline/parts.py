"""A part: the output rows of one attempt at one shard, one Parquet object, built in memory and uploaded once."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.config import JobConfig
from pipeline.faults import patience
from pipeline.quality import ends_in_loop
from pipeline.records import AcceptanceStats, PartReceipt, SampleRecord, ShardTask
from pipeline.redaction import without_credentials
from pipeline.redo import standing_part
from pipeline.schema import STATS_COLUMNS, output_schema, stats_of, to_row

_COUNTED = ("error_type", "finish_reason", "generation", "prompt_tokens", "completion_tokens", *STATS_COLUMNS)
"""What a receipt counts, of all rows of the part."""
_ROWS_PER_BATCH = 1024
_PATIENCE_S = 300.0
"""How long to try to write a part: it is worth the decoding of all its rows."""


def write_part(
    task: ShardTask,
    records: Sequence[SampleRecord],
    config: JobConfig,
    model_revision: str,
    worker: str,
    seconds: float,
    extra_metadata: Mapping[str, str] | None = None,
) -> PartReceipt:
    """Write the part of a task under its own name, and say what is in it.

    `records` come in order of input row, then sample: `sampling.n` per row, whether it failed or not; of a task that
    does some rows again (see `redo`) those of these rows, and the part holds all others as they were. `extra_metadata`
    goes into the file's metadata beside model, revision, coupling and k. Raises TransientError when the store fails;
    nothing is left behind then, as nothing is on any other exception.
    """
    standing = standing_part(task, config)
    num_rows = task.shard.num_rows if standing is None else len(standing.redone)
    assert len(records) == num_rows * config.sampling.n, (task, len(records))
    assert [r.sample_index for r in records] == [*range(config.sampling.n)] * num_rows, task
    table = _table(task, records, config, model_revision, extra_metadata or {})
    if standing is not None:
        table = standing.merged(table)
    data = encode_table(table)
    with patience(_PATIENCE_S):
        storage.write_bytes(storage.join(task.output, task.part_name), data)
    rows = table.select(_COUNTED).to_pylist()
    errors = Counter(row["error_type"] for row in rows if row["error_type"] is not None)
    return PartReceipt(
        shard_index=task.shard.index,
        attempt=task.attempt,
        path=task.part_name,
        num_rows=len(rows),
        num_failed=errors.total(),
        num_bytes=len(data),
        prompt_tokens=sum(row["prompt_tokens"] for row in rows),
        completion_tokens=sum(row["completion_tokens"] for row in rows),
        stats=reduce(add, map(stats_of, rows), AcceptanceStats()),
        errors=dict(errors),
        seconds=seconds,
        worker=worker,
        generation=0 if task.redo is None else task.redo.generation,
        num_looping=sum(ends_in_loop(row["generation"] or "") for row in rows),
        num_cut_off=sum(row["finish_reason"] == "length" for row in rows),
    )


def _table(
    task: ShardTask,
    records: Sequence[SampleRecord],
    config: JobConfig,
    model_revision: str,
    extra_metadata: Mapping[str, str],
) -> pa.Table:
    metadata = {
        "sevenleague.model": without_credentials(config.model.id),
        "sevenleague.model_revision": model_revision,
        "sevenleague.coupling": config.sampling.coupling,
        "sevenleague.k": str(config.sampling.logprobs),
        "sevenleague.shard": str(task.shard.index),
        **{f"sevenleague.{key}": value for key, value in extra_metadata.items()},
    }
    schema = output_schema(config, task.passthrough).with_metadata(metadata)
    rows = [to_row(record, config, model_revision) for record in records]
    return pa.Table.from_pylist(rows, schema=schema)


def encode_table(table: pa.Table) -> bytes:
    """Output rows as the bytes of a Parquet object."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def read_part_rows(path: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows of a part (all columns when none are named), streamed."""
    with storage.open_input(path) as source:
        file = pq.ParquetFile(source)
        # No threads: one that still holds the Python file when Python ends aborts the process.
        for batch in file.iter_batches(_ROWS_PER_BATCH, columns=list(columns) or None, use_threads=False):
            yield from batch.to_pylist()
