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
from pipeline.records import AcceptanceStats, PartReceipt, SampleRecord, ShardTask
from pipeline.schema import output_schema, to_row

_ROWS_PER_BATCH = 1024


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

    `records` come in order of input row, then sample: `sampling.n` per row, whether it failed or not. `extra_metadata`
    goes into the file's metadata beside model, revision, coupling and k. Raises TransientError when the store fails;
    nothing is left behind then, as nothing is on any other exception.
    """
    assert len(records) == task.shard.num_rows * config.sampling.n, (task, len(records))
    assert [r.sample_index for r in records] == [*range(config.sampling.n)] * task.shard.num_rows, task
    data = _encode(task, records, config, model_revision, extra_metadata or {})
    storage.write_bytes(storage.join(task.output, task.part_name), data)
    errors = Counter(record.error_type for record in records if record.error_type is not None)
    return PartReceipt(
        shard_index=task.shard.index,
        attempt=task.attempt,
        path=task.part_name,
        num_rows=len(records),
        num_failed=errors.total(),
        num_bytes=len(data),
        prompt_tokens=sum(record.prompt_tokens for record in records),
        completion_tokens=sum(record.completion_tokens for record in records),
        stats=reduce(add, (record.stats for record in records), AcceptanceStats()),
        errors=dict(errors),
        seconds=seconds,
        worker=worker,
    )


def _encode(
    task: ShardTask,
    records: Sequence[SampleRecord],
    config: JobConfig,
    model_revision: str,
    extra_metadata: Mapping[str, str],
) -> bytes:
    metadata = {
        "sevenleague.model": storage.without_credentials(config.model.id),
        "sevenleague.model_revision": model_revision,
        "sevenleague.coupling": config.sampling.coupling,
        "sevenleague.k": str(config.sampling.logprobs),
        "sevenleague.shard": str(task.shard.index),
        **{f"sevenleague.{key}": value for key, value in extra_metadata.items()},
    }
    schema = output_schema(config, task.passthrough).with_metadata(metadata)
    rows = [to_row(record, config, model_revision) for record in records]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), buffer, compression="zstd")
    return buffer.getvalue()


def read_part_rows(path: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows of a part (all columns when none are named), streamed."""
    with storage.open_input(path) as source:
        file = pq.ParquetFile(source)
        # No threads: one that still holds the Python file when Python ends aborts the process.
        for batch in file.iter_batches(_ROWS_PER_BATCH, columns=list(columns) or None, use_threads=False):
            yield from batch.to_pylist()
