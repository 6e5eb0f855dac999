"""The driver on a real Ray, with an actor that is everything but an engine: it reads rows and writes parts."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from pipeline import driver, storage
from pipeline.commits import JobStore
from pipeline.config import ClusterConfig, JobConfig
from pipeline.errors import ConfigError, PermanentError, RowError, TransientError
from pipeline.parts import read_part_rows, write_part
from pipeline.preparation import prepare
from pipeline.prompts import Prompt, read_prompts
from pipeline.records import AcceptanceStats, PartReceipt, Progress, SampleRecord, ShardTask, WorkerProgress
from pipeline.summary import JobSummary, status_of
from tests.pipeline.conftest import MakeJob
from tests.pipeline.makers import make_error, make_record, write_parquet

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def _ray_session() -> Iterator[None]:
    ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, object_store_memory=80 * 2**20, logging_level="error")
    yield
    ray.shutdown()


class EchoWorker:
    """Answers a prompt with itself. Prompts that begin with `!` do what they say.

    `!die` ends the process, `!slow` takes a second, `!fault` fails the shard twice with a TransientError (a file in
    `scratch` remembers it), `!fault-always` each time, `!bug` raises what nobody expects.
    """

    def __init__(self, config: JobConfig, name: str, scratch: str) -> None:
        self.config, self.name, self.scratch = config, name, Path(scratch)
        self.done = 0

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

    def progress(self) -> WorkerProgress:
        return WorkerProgress(self.name, "running", self.done, 0, 5 * self.done, 0, 0, AcceptanceStats())

    def log(self, line: str) -> None:
        with open(self.scratch / "log", "a") as file:
            file.write(f"{self.name} {os.getpid()} {line}\n")

    def prompts(self, task: ShardTask) -> list[Prompt]:
        return list(read_prompts(task.shard, self.config.input, self.config.output.columns))

    def write(self, task: ShardTask, records: list[SampleRecord]) -> PartReceipt:
        return write_part(task, records, self.config, "rev", self.name, 0.1)

    def answer(self, prompt: Prompt) -> SampleRecord:
        text = prompt.prompt or ""
        if text == "!die":
            os._exit(1)
        if text == "!slow":
            time.sleep(1.0)
        if text == "!fault-always" or (text == "!fault" and self.count("fault") <= 2):
            raise TransientError("the connection was lost")
        if text == "!bug":
            raise ZeroDivisionError("oops")
        self.done += 1
        return make_record(prompt.uid, generation=text)

    def count(self, name: str) -> int:
        with open(self.scratch / name, "a") as file:
            file.write("x")
        return (self.scratch / name).stat().st_size


RunJob = Callable[..., JobSummary]


@pytest.fixture
def run_job(tmp_path: Path, make_job: MakeJob) -> RunJob:
    """Run the job whose prompts are given, two rows to a shard."""

    def run(
        prompts: list[str],
        *overrides: str,
        max_restarts: int = -1,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> JobSummary:
        if not (tmp_path / "in.parquet").exists():
            write_parquet(tmp_path / "in.parquet", {"text": prompts})
        job = prepare(make_job("output.rows_per_shard=2", "cluster.cpus_per_worker=0.5", *overrides))
        actor = ray.remote(EchoWorker).options(
            num_cpus=0.5,
            max_restarts=max_restarts,
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


def test_a_job_runs_to_its_end(tmp_path: Path, run_job: RunJob) -> None:
    prompts = [f"p{i}" for i in range(9)]
    seen: list[Progress] = []
    summary = run_job(prompts, "cluster.workers=2", on_progress=seen.append)
    assert (summary.state, summary.rows_ok, summary.rows_failed, summary.rows_total) == ("done", 9, 0, 9)
    assert generations(tmp_path) == expected(prompts)
    assert sorted(log_lines(tmp_path, "generate")) == [f"generate {i}" for i in range(5)]
    assert (seen[-1].rows_done, seen[-1].shards_committed, seen[-1].completion_tokens) == (9, 5, 45)
    assert status_of(str(tmp_path / "out")).state == "done"


def test_a_finished_job_is_not_touched_again(tmp_path: Path, run_job: RunJob) -> None:
    first = run_job(["a", "b", "c"])
    assert run_job([]) == first
    assert len(log_lines(tmp_path, "generate")) == 2


def test_a_row_that_kills_is_found_and_the_rest_is_kept(tmp_path: Path, run_job: RunJob) -> None:
    prompts = [*"abcdefg", "!die", *"ij"]
    summary = run_job(prompts, "output.rows_per_shard=8", "cluster.workers=2")
    assert (summary.state, summary.rows_ok, summary.rows_failed) == ("done", 9, 1)
    assert summary.errors == {"worker_crash": 1}
    assert generations(tmp_path) == expected(prompts)
    assert log_lines(tmp_path, "probe") == ["probe 0 4", "probe 4 2", "probe 6 1", "probe 7 1"]


def test_a_worker_without_restarts_is_replaced(tmp_path: Path, run_job: RunJob) -> None:
    prompts = ["a", "!die"]
    run_job(prompts, max_restarts=0)
    assert generations(tmp_path) == expected(prompts)


def test_a_fault_that_passes_costs_an_attempt(tmp_path: Path, run_job: RunJob) -> None:
    prompts = ["a", "!fault", "c"]
    assert run_job(prompts).rows_failed == 0
    assert generations(tmp_path) == expected(prompts)
    assert log_lines(tmp_path, "generate").count("generate 0") == 3


def test_a_fault_that_stays_gives_the_shard_up(tmp_path: Path, run_job: RunJob) -> None:
    summary = run_job(["a", "!fault-always", "c"], "cluster.max_attempts=2")
    assert (summary.state, summary.errors) == ("done", {"shard_failed": 2})
    gone = {"in.parquet:0": "shard_failed", "in.parquet:1": "shard_failed"}
    assert generations(tmp_path) == {**gone, "in.parquet:2": "c"}


def test_config_errors_of_workers_stop_the_job_and_leave_no_trace(tmp_path: Path, run_job: RunJob) -> None:
    (tmp_path / "bad-model").touch()
    with pytest.raises(ConfigError) as raised:
        run_job(["a"])
    assert str(raised.value) == "model.id must exist, got 'tiny'"
    assert type(raised.value) is ConfigError
    assert storage.list_names(str(tmp_path / "out")) == []


def test_bugs_of_workers_stop_the_job(tmp_path: Path, run_job: RunJob) -> None:
    with pytest.raises(PermanentError) as raised:
        run_job(["a", "!bug"])
    assert str(raised.value) == "a worker met an error that it should have handled: ZeroDivisionError: oops"
    assert status_of(str(tmp_path / "out")).state == "failed"


def test_workers_that_cannot_start_stop_the_job(tmp_path: Path, run_job: RunJob) -> None:
    (tmp_path / "die-at-start").touch()
    with pytest.raises(PermanentError, match=r"^worker 0 could not start in 2 attempts: Actor"):
        run_job(["a"], "cluster.max_attempts=2")
    assert len(log_lines(tmp_path, "ready")) == 2


def test_sigterm_drains_and_the_next_run_goes_on(tmp_path: Path, run_job: RunJob) -> None:
    prompts = ["!slow", "a"] * 7
    sent: list[int] = []

    def stop_at_the_first_commits(progress: Progress) -> None:
        if progress.shards_committed and not sent:
            sent.append(progress.shards_committed)
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    summary = run_job(prompts, on_progress=stop_at_the_first_commits)
    assert signal.getsignal(signal.SIGTERM) == before
    assert summary.state == "interrupted"
    committed = set(JobStore(str(tmp_path / "out")).committed())
    assert sent[0] < len(committed) < 7, "what was in flight is committed, what was waiting is not"
    assert status_of(str(tmp_path / "out")).state == "interrupted"
    assert run_job([]).state == "done"
    assert generations(tmp_path) == expected(prompts)
    assert sorted(log_lines(tmp_path, "generate")) == [f"generate {i}" for i in range(7)], "no shard ran twice"


def test_two_drivers_on_one_output_commit_every_shard_once(tmp_path: Path, run_job: RunJob) -> None:
    prompts = [f"p{i}" for i in range(6)]
    write_parquet(tmp_path / "in.parquet", {"text": prompts})
    summaries: list[JobSummary] = []
    threads = [threading.Thread(target=lambda: summaries.append(run_job([]))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(summary.state, summary.rows_ok) for summary in summaries] == [("done", 6)] * 2
    assert generations(tmp_path) == expected(prompts)
    named = {receipt.path for receipt in JobStore(str(tmp_path / "out")).committed().values()}
    assert {f"data/{name}" for name in storage.list_names(str(tmp_path / "out" / "data"))} == named


def test_orphans_of_dead_attempts_are_removed(tmp_path: Path, run_job: RunJob, make_job: MakeJob) -> None:
    write_parquet(tmp_path / "in.parquet", {"text": ["a"]})
    job = prepare(make_job())
    orphan = ShardTask(job.plan.shards[0], 1, "dead", job.config.output.path, job.plan.passthrough)
    write_part(orphan, [make_record("x")], job.config, "rev", "worker-0", 1.0)
    run_job([])
    assert len(storage.list_names(str(tmp_path / "out" / "data"))) == 1
    assert generations(tmp_path) == {"in.parquet:0": "a"}


def test_a_job_on_s3(s3_bucket: str, tmp_path: Path, run_job: RunJob) -> None:
    out = f"{s3_bucket}/{tmp_path.name}/out"
    summary = run_job(["a", "b", "c"], f"output={out}", "output.rows_per_shard=2")
    assert summary.state == "done"
    manifest = json.loads(storage.read_bytes(storage.join(out, "_manifest.json")))
    rows = [
        row for part in manifest["parts"] for row in read_part_rows(storage.join(out, part["path"]), ["generation"])
    ]
    assert [row["generation"] for row in rows] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("cluster", "nodes", "sentence"),
    [
        (
            {"workers": 2, "gpus_per_worker": 1},
            [{"CPU": 8.0}],
            "cluster.gpus_per_worker asks for 2 GPUs in all (1 for each of 2 workers), the cluster has 0",
        ),
        (
            {"workers": 3, "cpus_per_worker": 1.5},
            [{"CPU": 2.0}, {"CPU": 2.0}],
            "cluster.cpus_per_worker asks for 4.5 CPUs in all (1.5 for each of 3 workers), the cluster has 4",
        ),
        (
            {"workers": 1, "gpus_per_worker": 4},
            [{"CPU": 8.0, "GPU": 2.0}] * 2,
            "cluster.gpus_per_worker asks for 4 GPUs of one machine, the largest has 2",
        ),
    ],
)
def test_more_than_the_cluster_has(cluster: dict[str, Any], nodes: list[dict[str, float]], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        driver.check_resources(ClusterConfig(**cluster), nodes)
    assert str(raised.value) == sentence


def test_a_job_that_asks_too_much_stops_before_it_starts(tmp_path: Path, run_job: RunJob) -> None:
    with pytest.raises(ConfigError, match=r"the cluster has 0$"):
        run_job(["a"], "cluster.gpus_per_worker=1")
    assert not (tmp_path / "log").exists()


def test_errors_travel_through_ray() -> None:
    """`RowError` has two arguments, which plain exceptions would lose on the way."""

    @ray.remote(num_cpus=0)
    def fail() -> None:
        raise RowError("empty_prompt", "the prompt is empty")

    with pytest.raises(RowError) as raised:
        ray.get(fail.remote())
    cause = raised.value.cause  # type: ignore[attr-defined]
    assert (cause.error_type, str(cause)) == ("empty_prompt", "the prompt is empty")
