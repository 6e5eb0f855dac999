"""The driver on a real Ray, with workers that echo their prompts or do what these say."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from pipeline import dispatch, storage, tenure
from pipeline.commits import JobStore
from pipeline.errors import ConfigError, PermanentError, RowError
from pipeline.parts import read_part_rows, write_part
from pipeline.preparation import RetryFailed, prepare
from pipeline.records import Progress, ShardTask
from pipeline.summary import status_of
from tests.pipeline.conftest import MakeJob
from tests.pipeline.echo import RunJob, expected, generations, job_runner, log_lines
from tests.pipeline.makers import make_record, write_parquet

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def _ray_session() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        logging_level="error",
    )
    yield
    ray.shutdown()


@pytest.fixture
def run_job(tmp_path: Path, make_job: MakeJob) -> RunJob:
    return job_runner(tmp_path, make_job)


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
    assert log_lines(tmp_path, "probe") == ["probe 0 4", "probe 4 2", "probe 6 1", "probe 7 1", "probe 7 1"]


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


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [("!freeze", "the worker has not answered for "), ("!stall", "the engine has finished no step for 100 s")],
)
def test_a_worker_that_hangs_is_replaced(
    tmp_path: Path, run_job: RunJob, caplog: pytest.LogCaptureFixture, prompt: str, reason: str
) -> None:
    """Its process is stopped, or it answers but its engine stands still."""
    prompts = ["a", prompt, "c"]
    summary = run_job(prompts, "cluster.hang_timeout_s=1.5")
    assert (summary.state, summary.rows_failed) == ("done", 0)
    assert generations(tmp_path) == expected(prompts)
    assert log_lines(tmp_path, "generate").count("generate 0") == 2
    assert any(line.startswith(f"worker-0 is replaced: {reason}") for line in caplog.messages), caplog.messages


def test_a_worker_that_drains_blames_no_shard(
    tmp_path: Path, run_job: RunJob, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = ["a", "!drain", *"cdefghij"]
    summary = run_job(prompts)
    assert (summary.state, summary.rows_failed) == ("done", 0)
    assert generations(tmp_path) == expected(prompts)
    assert len(log_lines(tmp_path, "ready")) == 2
    assert "shard 0 goes back (loss): the worker drains" in caplog.messages
    assert "(death)" not in caplog.text


def test_an_idle_worker_helps_a_straggler(tmp_path: Path, run_job: RunJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "STRAGGLER_MIN_S", 1.0)
    prompts = ["a", "!stuck-once", *"cdefghij"]
    summary = run_job(prompts, "cluster.workers=2", "cluster.hang_timeout_s=60")
    assert (summary.state, summary.rows_failed) == ("done", 0)
    assert generations(tmp_path) == expected(prompts)
    assert log_lines(tmp_path, "generate").count("generate 0") == 2


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


def test_a_second_driver_says_so_and_stops(tmp_path: Path, run_job: RunJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenure, "HEARTBEAT_S", 0.4)
    prompts = ["!slow"] * 8
    refusals: list[str] = []

    def run_another() -> None:
        with pytest.raises(ConfigError) as raised:
            run_job([])
        refusals.append(str(raised.value))

    second = threading.Thread(target=run_another)

    def start_another(progress: Progress) -> None:
        if progress.shards_committed and not second.ident:
            second.start()

    summary = run_job(prompts, on_progress=start_another)
    second.join()
    assert (summary.state, summary.rows_ok) == ("done", 8)
    here = f"(process {os.getpid()} on {socket.gethostname()})"
    assert refusals == [
        "output.path must have one driver at a time, got another one at work on "
        f"'{tmp_path}/out' {here}; this one stops"
    ]
    assert generations(tmp_path) == expected(prompts)
    assert len(log_lines(tmp_path, "generate")) == 4


def test_orphans_of_dead_attempts_are_removed(tmp_path: Path, run_job: RunJob, make_job: MakeJob) -> None:
    write_parquet(tmp_path / "in.parquet", {"text": ["a"]})
    job = prepare(make_job())
    orphan = ShardTask(job.plan.shards[0], 1, "dead", job.config.output.path, job.plan.passthrough)
    write_part(orphan, [make_record("x")], job.config, "rev", "worker-0", 1.0)
    run_job([])
    assert len(storage.list_names(str(tmp_path / "out" / "data"))) == 1
    assert generations(tmp_path) == {"in.parquet:0": "a"}


def test_failed_rows_are_done_again_when_asked_for(tmp_path: Path, run_job: RunJob) -> None:
    """Of two types, one after the other; shards without such rows, and rows that did not fail, are left alone."""
    prompts = ["a", "!broken", "b", "c", "!odd", "!broken", "d"]
    assert run_job(prompts).errors == {"broken": 2, "odd": 1}
    (tmp_path / "mended").touch()
    assert run_job([]).errors == {"broken": 2, "odd": 1}, "nothing is done again unasked"
    assert run_job([], retry_failed=RetryFailed("odd")).errors == {"broken": 2}
    assert generations(tmp_path) == {**expected(prompts), "in.parquet:1": "broken", "in.parquet:5": "broken"}
    before = len(log_lines(tmp_path, "generate"))
    summary = run_job([], retry_failed=RetryFailed())
    assert (summary.state, summary.rows_ok, summary.rows_failed) == ("done", 7, 0)
    assert generations(tmp_path) == expected(prompts)
    assert sorted(log_lines(tmp_path, "generate")[before:]) == ["generate 0", "generate 2"]
    assert status_of(str(tmp_path / "out")).to_json() == summary.to_json()
    assert len(storage.list_names(str(tmp_path / "out" / "data"))) == 4, "the parts that were replaced are gone"


def test_a_job_on_s3(s3_bucket: str, tmp_path: Path, run_job: RunJob) -> None:
    out = f"{s3_bucket}/{tmp_path.name}/out"
    summary = run_job(["a", "b", "c"], f"output={out}", "output.rows_per_shard=2")
    assert summary.state == "done"
    manifest = json.loads(storage.read_bytes(storage.join(out, "_manifest.json")))
    rows = [
        row for part in manifest["parts"] for row in read_part_rows(storage.join(out, part["path"]), ["generation"])
    ]
    assert [row["generation"] for row in rows] == ["a", "b", "c"]


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
