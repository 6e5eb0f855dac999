"""Everything that can be settled before Ray starts, so that mistakes in a job show at once."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from pipeline import storage
from pipeline.commits import JobStore
from pipeline.config import JobConfig
from pipeline.inputs import InputFile, find_inputs
from pipeline.records import PartReceipt, Shard
from pipeline.shards import Plan, plan

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A job that is ready to run. `config.output.path` is absolute, since workers may run elsewhere."""

    config: JobConfig
    plan: Plan
    receipts: dict[int, PartReceipt]

    @property
    def remaining(self) -> list[Shard]:
        """Shards that no commit names yet."""
        return [shard for shard in self.plan.shards if shard.index not in self.receipts]


def prepare(config: JobConfig) -> Prepared:
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
    job_plan = plan(config, files) if stored is None else _relocated(stored, files)
    return Prepared(config, job_plan, store.committed())


def _relocated(stored: Plan, files: tuple[InputFile, ...]) -> Plan:
    """The stored plan with the paths of today: the input may have moved since, its content and labels have not."""
    paths = {file.label: file.path for file in files}
    shards = tuple(replace(shard, path=paths[shard.label]) for shard in stored.shards)
    return replace(stored, shards=shards, files=files)
