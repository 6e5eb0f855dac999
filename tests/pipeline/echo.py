"""An actor that is everything but an engine: it reads rows, answers a prompt with itself, and writes parts."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import ray

from pipeline import driver
from pipeline.config import JobConfig
from pipeline.errors import ConfigError, TransientError, Withdrawn
from pipeline.parts import read_part_rows, write_part
from pipeline.preparation import RetryFailed, prepare
from pipeline.prompts import Prompt
from pipeline.records import AcceptanceStats, PartReceipt, Progress, SampleRecord, ShardTask, WorkerProgress
from pipeline.redo import prompts_of
from pipeline.summary import JobSummary
from tests.pipeline.conftest import MakeJob
from tests.pipeline.makers import make_error, make_record, write_parquet


class EchoWorker:
    """Answers a prompt with itself. Prompts that begin with `!` do what they say.

    `!die` ends the process, `!slow` takes a second, `!gate` waits for a file `gate` in `scratch`, `!fault` fails the
    shard twice with a TransientError (a file in `scratch` remembers it), `!fault-always` each time, `!bug` raises what
    nobody expects, `!broken` and `!odd` are error rows of these types until there is a file `mended`. Once only:
    `!freeze` stops the process, `!stall` waits for ever and says so, `!stuck-once` waits until it is withdrawn,
    `!drain` gives the shard back and ends the process when it has told so.
    """

    def __init__(self, config: JobConfig, name: str, scratch: str) -> None:
        self.config, self.name, self.scratch = config, name, Path(scratch)
        self.done = 0
        self.stalled_s = 0.0
        self.is_draining = False
        self.withdrawn = threading.Event()

    def ready(self) -> str:
        self.log("ready")
        if (self.scratch / "bad-model").exists():
            raise ConfigError("model.id must exist, got 'tiny'")
        if (self.scratch / "die-at-start").exists():
            os._exit(1)
        return "rev"

    def generate(self, task: ShardTask) -> PartReceipt:
        self.log(f"generate {task.shard.index}")
        records = [
            make_error(prompt.uid, error_type="worker_crash") if prompt.row in task.dead_rows else self.answer(prompt)
            for prompt in self.prompts(task)
        ]
        return self.write(task, records)

    def probe(self, task: ShardTask, start_row: int, num_rows: int) -> None:
        self.log(f"probe {start_row} {num_rows}")
        for prompt in self.prompts(task):
            if prompt.row in range(start_row, start_row + num_rows) and prompt.row not in task.dead_rows:
                self.answer(prompt)

    def fail_rows(self, task: ShardTask, error_type: str, message: str) -> PartReceipt:
        self.log(f"fail {task.shard.index}")
        return self.write(task, [make_error(prompt.uid, error_type=error_type) for prompt in self.prompts(task)])

    def withdraw(self, part_name: str) -> None:
        self.log("withdraw")
        self.withdrawn.set()

    def progress(self) -> WorkerProgress:
        if self.is_draining:
            threading.Timer(0.3, os._exit, [0]).start()
        state: Literal["running", "draining"] = "draining" if self.is_draining else "running"
        return WorkerProgress(self.name, state, self.done, 0, 5 * self.done, 0, 0, AcceptanceStats(), self.stalled_s)

    def log(self, line: str) -> None:
        with open(self.scratch / "log", "a") as file:
            file.write(f"{self.name} {os.getpid()} {line}\n")

    def prompts(self, task: ShardTask) -> list[Prompt]:
        return list(prompts_of(task, self.config))

    def write(self, task: ShardTask, records: list[SampleRecord]) -> PartReceipt:
        return write_part(task, records, self.config, "rev", self.name, 0.1)

    def answer(self, prompt: Prompt) -> SampleRecord:
        text = prompt.prompt or ""
        if text == "!die":
            os._exit(1)
        if text == "!slow":
            time.sleep(1.0)
        while text == "!gate" and not (self.scratch / "gate").exists():
            time.sleep(0.05)
        if text == "!fault-always" or (text == "!fault" and self.count("fault") <= 2):
            raise TransientError("the connection was lost")
        if text in ("!broken", "!odd") and not (self.scratch / "mended").exists():
            return make_error(prompt.uid, error_type=text[1:])
        if text == "!bug":
            raise ZeroDivisionError("oops")
        if text in ("!freeze", "!stall", "!stuck-once", "!drain") and self.count(text) == 1:
            self.misbehave(text)
        self.done += 1
        return make_record(prompt.uid, generation=text)

    def misbehave(self, text: str) -> None:
        if text == "!freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        if text == "!stall":
            self.stalled_s = 100.0
            threading.Event().wait()
        if text == "!stuck-once":
            self.withdrawn.wait()
            raise Withdrawn("the worker has given the shard back")
        self.is_draining = True
        raise Withdrawn("the worker drains")

    def count(self, name: str) -> int:
        with open(self.scratch / name, "a") as file:
            file.write("x")
        return (self.scratch / name).stat().st_size


RunJob = Callable[..., JobSummary]


def job_runner(tmp_path: Path, make_job: MakeJob) -> RunJob:
    """Runs the job whose prompts are given, two rows to a shard."""

    def run(
        prompts: list[str],
        *overrides: str,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        retry_failed: RetryFailed | None = None,
    ) -> JobSummary:
        if not (tmp_path / "in.parquet").exists():
            write_parquet(tmp_path / "in.parquet", {"text": prompts})
        job = prepare(make_job("output.rows_per_shard=2", "cluster.cpus_per_worker=0.5", *overrides), retry_failed)
        actor = ray.remote(EchoWorker).options(
            num_cpus=0.5,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=6,
            runtime_env={"env_vars": {k: v for k, v in os.environ.items() if k.startswith("AWS_")}},
        )
        return driver.run(job, lambda i: actor.remote(job.config, f"worker-{i}", str(tmp_path)), on_progress)

    return run


def log_lines(tmp_path: Path, kind: str) -> list[str]:
    """What the workers were asked for, without who was."""
    lines = [line.split(" ", 2)[2] for line in (tmp_path / "log").read_text().splitlines()]
    return [line for line in lines if line.startswith(kind)]


def generations(tmp_path: Path) -> dict[str, str]:
    """Generation, or the error's type, by id; each id once."""
    rows: dict[str, str] = {}
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    for part in manifest["parts"]:
        for row in read_part_rows(str(tmp_path / "out" / part["path"]), []):
            assert row["id"] not in rows
            rows[row["id"]] = row["generation"] or row["error_type"]
    return rows


def expected(prompts: list[str]) -> dict[str, str]:
    return {f"in.parquet:{i}": "worker_crash" if text == "!die" else text for i, text in enumerate(prompts)}
