"""Exactly once, whatever dies: the worker, then the driver, by kill -9 in the midst of a job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from pipeline.summary import status_of

pytestmark = pytest.mark.ray

MakeJob = Callable[..., Any]
RunCli = Callable[..., subprocess.CompletedProcess[str]]
StartCli = Callable[..., subprocess.Popen[str]]

PROMPTS = [f"One step of seven-league boots, number {i}." for i in range(32)]
SHARDS = 16
SLOW = {
    "output": {"rows_per_shard": 2},
    "sampling": {"max_tokens": 100, "ignore_eos": True},
    "decoding": {"strategy": "autoregressive"},
    "engine": {"max_sequences": 2},
    "cluster": {"workers": 2},
}
IDENTITY = ("id", "sample_index", "prompt", "generation", "completion_token_ids", "finish_reason", "seed")


def committed(output: Path) -> dict[str, float]:
    """Commits by name, and when they were written."""
    return {path.name: path.stat().st_mtime for path in output.glob("_commits/*.json")}


def wait_for_commits(output: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    while len(committed(output)) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no commits"
        time.sleep(0.1)


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [child for child in children_of(process) if "GenerationWorker" in " ".join(child.info["cmdline"] or ())]


def children_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """With `info` of each, which is empty where it ends just now."""
    children = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    return [child for child in psutil.process_iter(["name", "cmdline"]) if child.pid in children]


def rows_of(output: Path) -> list[dict[str, Any]]:
    """What readers see: the parts that the manifest names."""
    manifest = json.loads((output / "_manifest.json").read_text())
    rows = [row for part in manifest["parts"] for row in pq.read_table(output / part["path"]).to_pylist()]
    return sorted(rows, key=lambda row: (row["id"], row["sample_index"]))


def identity(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(str(row[key]) for key in IDENTITY) for row in rows]


@pytest.fixture
def start_killable(start_cli: StartCli) -> Iterator[StartCli]:
    """As `start_cli`, and no process of it survives the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: Any) -> subprocess.Popen[str]:
        started.append(start_cli(*arguments))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_a_job_that_is_stopped_and_killed_gives_the_data_of_an_undisturbed_one(
    make_job: MakeJob, run_here: Callable[[Any], None], run_cli: RunCli, start_killable: StartCli
) -> None:
    calm = make_job(PROMPTS, name="calm", **SLOW)
    run_here(calm)
    job = make_job(calm.file.with_suffix(".parquet"), name="disturbed", **SLOW)

    after_sigterm = stop_by_sigterm(job, start_killable("run", job.file))
    assert status_of(str(job.output)).state == "interrupted"
    after_kill = kill_worker_then_driver(job, start_killable("run", job.file))
    parts = {path.name for path in job.output.glob("data/*")}
    assert run_cli("run", job.file).returncode == 0

    final = committed(job.output)
    assert len(final) == SHARDS
    assert after_sigterm.items() < after_kill.items() < final.items(), "a committed shard was committed again"
    written = {path.name for path in job.output.glob("data/*")} - parts
    assert len(written) == SHARDS - len(after_kill), "a committed shard was decoded again"
    rows = rows_of(job.output)
    assert len({(row["id"], row["sample_index"]) for row in rows}) == len(rows) == len(PROMPTS)
    assert identity(rows) == identity(rows_of(calm.output))
    assert status_of(str(job.output)).state == "done"


def stop_by_sigterm(job: Any, driver: subprocess.Popen[str]) -> dict[str, float]:
    """What is committed when the driver has drained."""
    wait_for_commits(job.output, 1, driver)
    driver.send_signal(signal.SIGTERM)
    stdout, stderr = driver.communicate(timeout=60)
    assert driver.returncode == 4, stderr
    assert "Interrupted; run the same command again to resume." in stdout
    assert "Traceback" not in stderr
    return committed(job.output)


def kill_worker_then_driver(job: Any, driver: subprocess.Popen[str]) -> dict[str, float]:
    """What is committed when, after some commits, a worker was killed with -9, one was told to end, and then the driver
    was killed with -9.
    """
    deadline = time.monotonic() + 90
    while len(workers := workers_of(driver)) < 2:
        assert driver.poll() is None, driver.communicate()
        assert time.monotonic() < deadline, "the workers do not start"
        time.sleep(0.1)
    wait_for_commits(job.output, len(committed(job.output)) + 1, driver)
    killed, drained = workers
    killed.kill()
    drained.terminate()  # as on a spot machine that is taken away: it finishes what it has
    before = len(committed(job.output))
    psutil.wait_procs([drained], timeout=60)  # twice cluster.grace_s
    assert not drained.is_running()
    wait_for_commits(job.output, before + 2, driver)
    workers = workers_of(driver)
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive, alive  # else they might still write parts
    return committed(job.output)


def test_sigterm_while_ray_starts(make_job: MakeJob, start_killable: StartCli) -> None:
    job = make_job(PROMPTS[:2])
    driver = start_killable("run", job.file)
    deadline = time.monotonic() + 60
    while "gcs_server" not in [child.info["name"] for child in children_of(driver)]:
        assert driver.poll() is None, driver.communicate()
        assert time.monotonic() < deadline, "Ray does not start"
        time.sleep(0.1)
    driver.send_signal(signal.SIGTERM)
    _, stderr = driver.communicate(timeout=60)
    assert driver.returncode == 4, stderr
    assert stderr.splitlines()[-1] == "sevenleague: interrupted, run the same command again to resume"
