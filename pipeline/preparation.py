"""Everything that can be settled before Ray starts, so that mistakes in a job show at once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline import storage
from pipeline.commits import JobStore
from pipeline.config import JobConfig
from pipeline.inputs import InputFile, find_inputs
from pipeline.records import PartReceipt, Redo, RetryRound, Shard
from pipeline.redo import failures
from pipeline.shards import Plan, plan

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RetryFailed:
    """The wish to do failed rows again; with a type, only those that failed with errors of it."""

    error_type: str | None = None


@dataclass(frozen=True)
class Prepared:
    """A job that is ready to run. `config.output.path` is absolute, since workers may run elsewhere.

    `redo` says which committed shards have failed rows that are to be done again, in the round `retry`.
    """

    config: JobConfig
    plan: Plan
    receipts: dict[int, PartReceipt]
    redo: Mapping[int, Redo] = field(default_factory=dict)
    retry: RetryRound | None = None

    @property
    def settled(self) -> dict[int, PartReceipt]:
        """Receipts of the shards that nothing is to be done about."""
        return {index: receipt for index, receipt in self.receipts.items() if index not in self.redo}

    @property
    def remaining(self) -> list[Shard]:
        """Shards that no commit names yet, and those with rows to be done again."""
        settled = self.settled
        return [shard for shard in self.plan.shards if shard.index not in settled]


def prepare(config: JobConfig, retry_failed: RetryFailed | None = None) -> Prepared:
    """Find the input, try the output, compare identities, and make or load the plan. Raises ConfigError."""
    output = config.output.model_copy(update={"path": storage.absolute(config.output.path)})
    config = config.model_copy(update={"output": output})
    files = find_inputs(config.input)
    storage.check_writable(output.path)
    if not storage.has_conditional_put(output.path):
        logger.warning("the store of %s has no conditional put: run only one driver at a time on it", output.path)
    store = JobStore(output.path)
    store.check_identity(config, files)
    stored = store.load_plan()
    job_plan = plan(config, files) if stored is None else _grown(config, stored, files)
    receipts = store.committed()
    if retry_failed is None:
        return Prepared(config, job_plan, receipts)
    retry = _round(receipts.values(), store.retry_round(), retry_failed)
    redo = {
        index: Redo(receipt.path, retry.generation, retry.error_type)
        for index, receipt in receipts.items()
        if receipt.generation < retry.generation and failures(receipt, retry.error_type)
    }
    return Prepared(config, job_plan, receipts, redo, retry if redo else None)


def _round(receipts: Iterable[PartReceipt], begun: RetryRound | None, wish: RetryFailed) -> RetryRound:
    """The round that a driver began and did not finish, where it was about the same errors; else the next one."""
    if begun is not None and begun.error_type == wish.error_type:
        return begun
    last = max((receipt.generation for receipt in receipts), default=0)
    return RetryRound(max(last, 0 if begun is None else begun.generation) + 1, wish.error_type)


def _grown(config: JobConfig, stored: Plan, files: Sequence[InputFile]) -> Plan:
    """The stored plan, and shards of files that it does not have (there are none without `input.allow_append`)."""
    known = {file.label for file in stored.files}
    old = _relocated(stored, [file for file in files if file.label in known])
    new = [file for file in files if file.label not in known]
    return plan(config, new, before=old) if new else old


def _relocated(stored: Plan, files: Sequence[InputFile]) -> Plan:
    """The stored plan with the paths of today: the input may have moved since, its content and labels have not."""
    paths = {file.label: file.path for file in files}
    shards = tuple(
        shard if shard.path == paths[shard.label] else replace(shard, path=paths[shard.label])
        for shard in stored.shards
    )
    return replace(stored, shards=shards, files=tuple(files))
