"""What is stored of a job beside its parts, and how a part becomes part of the output: exactly once.

======================  ===============================================================================
object                  meaning
======================  ===============================================================================
``_job.json``           identity and resolved configuration; created once, another identity is refused
``_plan.parquet``       the shards
``_commits/*``          one receipt per shard, created if absent; what readers follow (see `commit_log`)
``_commits.jsonl.gz``   the same once more, to save reading them one by one
``_retry.json``         while failed rows are done again: which ones
``_driver.json``        state and heartbeat of the driver, so that its death shows from outside
``_manifest.json``, ``metrics.json``, ``README.md``, ``_SUCCESS``  written at the end, in this order
======================  ===============================================================================

Only drivers write here. Two drivers on one output waste work but never commit a shard twice.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Literal

import yaml

from pipeline import storage
from pipeline.commit_log import CommitLog
from pipeline.config import JobConfig
from pipeline.config_io import parse_job
from pipeline.errors import ConfigError
from pipeline.inputs import InputFile
from pipeline.plan_storage import encode_plan, read_plan, write_plan
from pipeline.records import PartReceipt, RetryRound
from pipeline.redaction import redacted, without_credentials
from pipeline.shards import Plan

JobState = Literal["planned", "running", "interrupted", "done", "failed"]
DriverState = Literal["running", "interrupted", "done", "failed"]

LEASE_S = 30.0
"""A running driver whose heartbeat is older than this is taken for dead (clocks may differ by some seconds)."""

_REVISION = "model revision as loaded"
_FILE = "input file "


class JobStore:
    """The stored state of one job, by the root of its output."""

    def __init__(self, output: str) -> None:
        self.output = output
        self._log = CommitLog(output)

    def check_identity(self, config: JobConfig, files: Sequence[InputFile], model_revision: str | None = None) -> None:
        """Raise ConfigError where the output belongs to a job that would give other rows. An empty output passes.

        Files that it did not have are allowed with `input.allow_append`.
        """
        if not storage.exists(self._path("_job.json")):
            return
        stored = self._job()["identity"]
        mine = job_identity(config, files, model_revision)
        compared = [key for key in {**stored, **mine} if key != _REVISION or model_revision is not None]
        if config.input.allow_append:
            compared = [key for key in compared if key in stored or not key.startswith(_FILE)]
        changes = [
            f"{key} was {_shown(stored, key)} and is {_shown(mine, key)} now"
            for key in compared
            if stored.get(key) != mine.get(key)
        ]
        if changes:
            raise ConfigError(
                f"output.path must be empty or hold the same job, got {self.output!r} where {', '.join(changes)}"
            )

    def create_or_resume(
        self, config: JobConfig, plan: Plan, model_revision: str, retry: RetryRound | None = None
    ) -> None:
        """Make the job unless it is there; raises ConfigError when another one is. A retry opens a finished job again.

        Its manifest and the parts that it names stay until `finish` replaces them.
        """
        job = {
            "identity": job_identity(config, plan.files, model_revision),
            "config": _redacted(config.model_dump(mode="json")),
            "created": time.time(),
        }
        storage.create_if_absent(self._path("_job.json"), _json(job))
        self.check_identity(config, plan.files, model_revision)
        if not write_plan(self._path("_plan.parquet"), plan):
            self._append(job, plan)
        if retry is not None:
            storage.write_bytes(self._path("_retry.json"), _json(dataclasses.asdict(retry)))
            storage.delete(self._path("_SUCCESS"))

    def _append(self, job: Mapping[str, Any], plan: Plan) -> None:
        """Take files that a job did not have before into it (`input.allow_append`). The identity comes last."""
        stored = self._job()
        if not any(key.startswith(_FILE) for key in job["identity"].keys() - stored["identity"].keys()):
            return
        storage.write_bytes(self._path("_plan.parquet"), encode_plan(plan))
        storage.delete(self._path("_SUCCESS"))
        storage.write_bytes(self._path("_job.json"), _json({**job, "created": stored["created"]}))

    def load_config(self) -> JobConfig:
        """The configuration that made the job, credentials in URLs replaced. Raises ConfigError where there is none."""
        return parse_job(self._job()["config"])

    def model_revision(self) -> str:
        """The revision of the model that made the job. Raises ConfigError where there is no job."""
        return str(self._job()["identity"][_REVISION])

    def created(self) -> float:
        """When the job was made, in Unix seconds. Raises ConfigError where there is no job."""
        return float(self._job()["created"])

    def load_plan(self) -> Plan | None:
        """The stored plan; None before there is one."""
        try:
            return read_plan(self._path("_plan.parquet"))
        except FileNotFoundError:
            return None

    def committed(self) -> dict[int, PartReceipt]:
        """Receipts of all committed shards by shard index, in order, from the commits alone."""
        return self._log.committed()

    def commit(self, receipt: PartReceipt) -> PartReceipt:
        """Make a part the shard's one; returns the receipt that stands (see `CommitLog.commit`)."""
        return self._log.commit(receipt)

    def retry_round(self) -> RetryRound | None:
        """The round of doing failed rows again that is under way; None where there is none."""
        try:
            return RetryRound(**json.loads(storage.read_bytes(self._path("_retry.json"))))
        except FileNotFoundError:
            return None

    def set_state(self, state: DriverState, run_id: str, message: str = "") -> None:
        """Say how the driver is; a running one says it again every few seconds."""
        beat = {
            "state": state,
            "run_id": run_id,
            "heartbeat": time.time(),
            "message": redacted(message),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        if state in ("interrupted", "failed"):
            self._log.compact()
        storage.write_bytes(self._path("_driver.json"), _json(beat))

    def state(self) -> JobState:
        """The job's state as far as storage tells. Raises ConfigError where there is no job."""
        self._job()
        if storage.exists(self._path("_SUCCESS")):
            return "done"
        beat = self.beat()
        if beat is None:
            return "planned"
        is_dead = beat["state"] == "running" and time.time() - beat["heartbeat"] > LEASE_S
        # a driver that was done, without `_SUCCESS`: what followed it has not begun
        state: JobState = "interrupted" if is_dead or beat["state"] == "done" else beat["state"]
        return state

    def beat(self) -> dict[str, Any] | None:
        """What a driver last said of itself; None where none has yet."""
        try:
            beat: dict[str, Any] = json.loads(storage.read_bytes(self._path("_driver.json")))
        except FileNotFoundError:
            return None
        return beat

    def heartbeat_age_s(self) -> float | None:
        """Seconds since a driver last said how it is; None where none has yet."""
        beat = self.beat()
        return None if beat is None else max(0.0, time.time() - float(beat["heartbeat"]))

    def finish(self, config: JobConfig, receipts: Iterable[PartReceipt], metrics: Mapping[str, Any]) -> None:
        """Write the closing objects, `_SUCCESS` last. Repeatable.

        Parts that no commit names go once the manifest names those that stand: what attempts left that came too late,
        and what a retry has replaced. A part that arrives even later (of a worker that outlives its driver) stays until
        the job is run again; no reader of the manifest sees it.
        """
        ordered = sorted(receipts, key=lambda receipt: receipt.shard_index)
        self._log.compact()
        storage.write_bytes(self._path("_manifest.json"), _json(_manifest(ordered)))
        storage.write_bytes(self._path("metrics.json"), _json(metrics))
        storage.write_bytes(self._path("README.md"), _card(config, ordered).encode())
        self._remove_unnamed({receipt.path for receipt in ordered})
        storage.delete(self._path("_retry.json"))
        storage.write_bytes(self._path("_SUCCESS"), b"")

    def _remove_unnamed(self, named: Set[str]) -> None:
        for name in storage.list_names(self._path("data")):
            if f"data/{name}" not in named:
                storage.delete(self._path("data", name))
        storage.remove_leftovers(self._path("data"))

    def _path(self, *names: str) -> str:
        return storage.join(self.output, *names)

    def _job(self) -> dict[str, Any]:
        try:
            job: dict[str, Any] = json.loads(storage.read_bytes(self._path("_job.json")))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ConfigError(f"output.path must be the output of a job, got {self.output!r}") from error
        return job


def job_identity(config: JobConfig, files: Sequence[InputFile], model_revision: str | None = None) -> dict[str, Any]:
    """What decides the output, flat: dotted keys of the job, an entry per input file, the model's revision."""
    identity = _flat(_redacted(config.identity()), "")
    for file in files:
        identity[f"{_FILE}{file.label!r}"] = f"{file.size} bytes with content {file.etag}"
    if model_revision is not None:
        identity[_REVISION] = model_revision
    return identity


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def _shown(identity: Mapping[str, Any], key: str) -> str:
    if key not in identity:
        return "absent"
    value = identity[key]
    return value if key.startswith(_FILE) else json.dumps(value, ensure_ascii=False)


def _redacted(value: Any) -> Any:
    """Plain values with the credentials in their URLs replaced."""
    if isinstance(value, dict):
        return {key: _redacted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_redacted(item) for item in value]
    return without_credentials(value) if isinstance(value, str) else value


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False).encode()


def _manifest(receipts: Sequence[PartReceipt]) -> dict[str, Any]:
    parts = [
        {
            "path": receipt.path,
            "rows": receipt.num_rows,
            "failed": receipt.num_failed,
            "bytes": receipt.num_bytes,
            "shard": receipt.shard_index,
        }
        for receipt in receipts
    ]
    return {
        "rows": sum(receipt.num_rows for receipt in receipts),
        "failed": sum(receipt.num_failed for receipt in receipts),
        "parts": parts,
    }


def _card(config: JobConfig, receipts: Sequence[PartReceipt]) -> str:
    """A dataset card: `datasets.load_dataset(OUTPUT)` reads the parts that its head names, and no others."""
    files = [{"split": "train", "path": [receipt.path for receipt in receipts]}]
    head = yaml.safe_dump({"configs": [{"config_name": "default", "data_files": files}], "tags": ["synthetic"]})
    rows = sum(receipt.num_rows for receipt in receipts)
    failed = sum(receipt.num_failed for receipt in receipts)
    sampling = config.sampling
    trusted = "\nPython code that came with the model was run (`model.trust_remote_code` is on).\n"
    return f"""---
{head}---
# Generations of {without_credentials(config.model.id)}

{rows} rows, {failed} of them failed (`finish_reason` is `error`), made by sevenleague with {sampling.n} sample(s) per
prompt at temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, at most {sampling.max_tokens} new tokens,
seed {sampling.seed}. Counts and rates are in `metrics.json`, the whole configuration in `_job.json`.
{trusted if config.model.trust_remote_code else ""}"""
