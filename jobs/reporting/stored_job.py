"""What a report is made from: a job as its storage tells it, finished or not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from pipeline import storage
from pipeline.commits import JobStore
from pipeline.config import JobConfig
from pipeline.part_reading import read_part
from pipeline.records import PartReceipt
from pipeline.redaction import without_credentials
from pipeline.schema import output_schema
from pipeline.summary import JobSummary, summarise


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A job at one moment. `columns` are those of its parts, `copied` those of them that came with the input, `message`
    is what its driver said when it ended early."""

    output: str
    config: JobConfig
    receipts: tuple[PartReceipt, ...]
    summary: JobSummary
    columns: tuple[str, ...]
    copied: tuple[str, ...]
    message: str
    read_at: float

    @property
    def shown_output(self) -> str:
        return without_credentials(self.output)

    @property
    def timed_receipts(self) -> list[PartReceipt]:
        """Those that say when their attempt was made, which receipts of earlier versions do not."""
        return [receipt for receipt in self.receipts if receipt.began > 0]

    def read(self, receipt: PartReceipt, columns: Sequence[str]) -> pa.Table:
        """Some columns of one of its parts."""
        return read_part(storage.join(self.output, receipt.path), columns)


def read_job(output: str) -> StoredJob:
    """Raises ConfigError where there is no job."""
    store = JobStore(output)
    state = store.state()
    config, plan = store.load_config(), store.load_plan()
    receipts = tuple(store.committed().values())
    schema = None if plan is None else output_schema(config, plan.passthrough)
    return StoredJob(
        output=output,
        config=config,
        receipts=receipts,
        summary=summarise(receipts, plan, config, state),
        columns=() if schema is None else tuple(schema.names),
        copied=() if plan is None else tuple(plan.passthrough.names),
        message=str((store.beat() or {}).get("message", "")),
        read_at=time.time(),
    )
