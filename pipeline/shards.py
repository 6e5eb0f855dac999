"""The plan of a job: every input file cut into shards, the same way every time.

Only footers are read (of JSONL files the line ends), many at once, and of an id column its values. A Parquet file whose
footer is corrupt stops the job before it starts; a row group that turns out corrupt while rows are read only fails its
own rows (see `readers`). The plan is written once, as `_plan.parquet`, and read back on resume (see `plan_storage`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby

import pyarrow as pa

from pipeline.checks import Columns, check_columns, check_ids, check_job, passthrough_schema
from pipeline.config import JobConfig
from pipeline.cutting import CutFile, cut
from pipeline.errors import ConfigError
from pipeline.inputs import InputFile, find_inputs
from pipeline.openai_requests import not_obeyed
from pipeline.parallel import in_order
from pipeline.records import Shard

logger = logging.getLogger(__name__)


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


def plan(config: JobConfig, files: Sequence[InputFile] | None = None, before: Plan | None = None) -> Plan:
    """Cut the input into shards of `output.rows_per_shard` rows, at most; a shard never crosses files.

    Raises ConfigError, in one sentence, for whatever in the input makes the job impossible; of several mistakes the
    first in file order counts. Files behind `input.limit` are not looked into. The shards of a plan `before` keep their
    numbers, and those of `files` follow them.
    """
    check_job(config)
    files = tuple(find_inputs(config.input) if files is None else files)
    shards: list[Shard] = []
    spans: list[tuple[Shard, Columns]] = []
    ignored: dict[str, None] = {}
    with closing(_cut_files(files, config)) as parts:
        for part in parts:
            if part.shards:
                check_columns(config, part.columns, part.file.path)
                if part.file.format == "openai_batch":
                    ignored |= dict.fromkeys(not_obeyed(part.columns, config.input))
                spans.append((_span(part.shards), {name: part.columns[name] for name in config.output.columns}))
                shards += [replace(shard, index=index) for index, shard in enumerate(part.shards, len(shards))]
    if not shards:
        raise ConfigError(
            f"input.path must hold at least one row, got none in {', '.join(file.path for file in files)}"
        )
    if ignored:
        logger.warning("parameters in the bodies of requests are not obeyed (docs/input.md): %s", ", ".join(ignored))
    if before is not None:
        return _appended(config, before, shards, files, spans)
    check_ids(config, [span for span, _ in spans])
    return Plan(tuple(shards), files, sum(shard.num_rows for shard in shards), passthrough_schema(config, spans))


def _appended(
    config: JobConfig,
    before: Plan,
    shards: Sequence[Shard],
    files: Sequence[InputFile],
    spans: Sequence[tuple[Shard, Columns]],
) -> Plan:
    """Raises ConfigError where an id is there already, or copied columns do not fit the parts that may be done."""
    old = [_span(list(group)) for _, group in groupby(before.shards, lambda shard: shard.label)]
    check_ids(config, [*old, *(span for span, _ in spans)])
    settled = {field.name: field.type for field in before.passthrough}
    types = passthrough_schema(config, [(replace(old[0], format="parquet"), settled), *spans])
    for field in types:
        if field.type != settled[field.name]:
            raise ConfigError(
                f"output.columns must keep their types where files are appended, got {field.type} for column "
                f"{field.name!r}, which was {settled[field.name]}"
            )
    numbered = [replace(shard, index=index) for index, shard in enumerate(shards, len(before.shards))]
    num_rows = before.num_rows + sum(shard.num_rows for shard in shards)
    return Plan((*before.shards, *numbered), (*before.files, *files), num_rows, before.passthrough)


def _cut_files(files: Iterable[InputFile], config: JobConfig) -> Generator[CutFile, None, None]:
    if config.input.limit is None:
        yield from in_order(lambda file: cut(file, config, sys.maxsize), files)
        return
    left = config.input.limit
    for file in files:
        if left == 0:
            return
        part = cut(file, config, left)
        left -= sum(shard.num_rows for shard in part.shards)
        yield part


def _span(shards: Sequence[Shard]) -> Shard:
    """One shard that covers consecutive shards of a file."""
    groups = sorted({group for shard in shards for group in shard.row_groups})
    return replace(
        shards[0],
        num_rows=sum(shard.num_rows for shard in shards),
        row_groups=tuple(groups),
        byte_range=(shards[0].byte_range[0], shards[-1].byte_range[1]),
    )
