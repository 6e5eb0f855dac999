"""Doing failed rows of a committed shard again (`run --retry-failed`): which rows, and a part of new and old ones.

Rows come and stay in the order of input row, then sample. A row whose samples did not all fail is done again as a whole
when one of them failed; its good samples come out as before, since nothing but the row decides them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from pipeline import storage
from pipeline.config import JobConfig
from pipeline.errors import PermanentError
from pipeline.part_reading import read_part
from pipeline.prompts import Prompt, read_prompts
from pipeline.records import PartReceipt, Redo, ShardTask


@dataclass(frozen=True)
class StandingPart:
    """The rows of the part that stands, and the numbers (within the shard) of the input rows to be done again."""

    table: pa.Table
    samples: int
    redone: frozenset[int]

    def merged(self, new: pa.Table) -> pa.Table:
        """The rows that stay and, in the place of the others, `new`.

        Worked example: of rows a b c with two samples each, a row b done again gives old rows 0 1, new rows 0 1, old
        rows 4 5.
        """
        copied = self._copied()
        assert new.num_rows + len(copied) == self.table.num_rows, (new.num_rows, len(copied), self.table.num_rows)
        both = pa.concat_tables([self.table.take(copied).cast(new.schema), new])
        old, fresh = iter(range(len(copied))), iter(range(len(copied), both.num_rows))
        order = [next(fresh if self._is_redone(index) else old) for index in range(both.num_rows)]
        return both.take(order)

    def _copied(self) -> pa.Array:
        return pa.array([index for index in range(self.table.num_rows) if not self._is_redone(index)], pa.int64())

    def _is_redone(self, index: int) -> bool:
        return index // self.samples in self.redone


def failures(receipt: PartReceipt, error_type: str | None) -> int:
    """How many output rows of a part failed, with errors of one type where one is given."""
    return receipt.num_failed if error_type is None else receipt.errors.get(error_type, 0)


def prompts_of(task: ShardTask, config: JobConfig) -> Iterator[Prompt]:
    """The prompts that a task asks for: those of all rows of its shard, or of the rows to be done again."""
    prompts = read_prompts(task.shard, config.input, config.output.columns)
    if task.redo is None:
        yield from prompts
        return
    part = _read(task, task.redo, config, ["finish_reason", "error_type"])
    for prompt in prompts:
        if prompt.row - task.shard.start_row in part.redone:
            yield prompt


def standing_part(task: ShardTask, config: JobConfig) -> StandingPart | None:
    """What a task leaves as it is; None where it does all rows."""
    return None if task.redo is None else _read(task, task.redo, config, None)


def _read(task: ShardTask, redo: Redo, config: JobConfig, columns: list[str] | None) -> StandingPart:
    table = read_part(storage.join(task.output, redo.part), columns)
    samples = config.sampling.n
    if table.num_rows != task.shard.num_rows * samples:
        raise PermanentError(f"{redo.part} must hold {task.shard.num_rows * samples} rows, it has {table.num_rows}")
    is_meant = pc.equal(table["finish_reason"], "error")
    if redo.error_type is not None:
        is_meant = pc.and_(is_meant, pc.fill_null(pc.equal(table["error_type"], redo.error_type), False))
    redone = frozenset(index // samples for index, meant in enumerate(is_meant.to_pylist()) if meant)
    return StandingPart(table, samples, redone)
