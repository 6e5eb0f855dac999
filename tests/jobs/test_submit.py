"""Jobs submitted to a real Ray head through its HTTP address, as `ray start --head` starts one; what is submitted."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from jobs.checkup.reachable import findings
from jobs.exit_codes import ExitCode
from jobs.ray_jobs import RayJobs, exit_code_of
from jobs.submission import JOB_FILE, for_cluster, job_key, split_id, stage
from pipeline.config_io import load_job, parse_job
from pipeline.errors import ConfigError, PermanentError, SevenLeagueError
from pipeline.summary import status_of
from tests.jobs.conftest import call

MakeJob = Callable[..., Any]
StartCli = Callable[..., subprocess.Popen[str]]

ROOT = Path(__file__).parents[2]
PROMPTS = [*(f"One step of seven-league boots, number {i}." for i in range(39)), None]
SHARDS = 20
SLOW = {
    "output": {"rows_per_shard": 2},
    "sampling": {"max_tokens": 150, "ignore_eos": True},
    "decoding": {"strategy": "autoregressive"},
    "engine": {"max_sequences": 1, "compile": "off"},
}


@contextlib.contextmanager
def ray_token(token: str) -> Iterator[None]:
    """A token for a head that starts meanwhile and for commands; the user's is neither read nor made."""
    from ray._raylet import AuthenticationTokenLoader, Config

    def read_again() -> None:
        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", token)
        read_again()
        yield
    read_again()


@pytest.fixture(scope="module")
def token() -> Iterator[None]:
    with ray_token(secrets.token_hex(32)):
        yield


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    """Of a head: the one of the cluster, and the one of the dashboard, which takes jobs."""
    gcs, dashboard = free_ports(2)
    return gcs, dashboard


@pytest.fixture(scope="module")
def head(token: None, ports: tuple[int, int]) -> Iterator[str]:
    """The HTTP address of a Ray head of its own: own ports, own folder, ended by the ids of its own processes."""
    gcs, dashboard = ports
    options = {
        "port": gcs,
        "node-ip-address": "127.0.0.1",
        "num-cpus": 4,
        "object-store-memory": 80 * 2**20,
        "dashboard-host": "127.0.0.1",
        "dashboard-port": dashboard,
        "dashboard-agent-listen-port": 0,
    }
    address = f"http://127.0.0.1:{dashboard}"
    with tempfile.TemporaryDirectory(prefix="sl-", ignore_cleanup_errors=True) as folder:  # short: it holds sockets
        arguments = [f"--{name}={value}" for name, value in {**options, "temp-dir": folder}.items()]
        with open(Path(folder) / "start.log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=folder,
                env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PATH": f"{venv()}{os.pathsep}{os.environ['PATH']}"},
            )
        try:
            wait_until(lambda: answers(address), "the head does not start")
            yield address
        finally:
            end_with_children(process)


def venv() -> Path:
    return Path(sys.executable).parent


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def answers(address: str) -> bool:
    try:
        return RayJobs(address).attempts("none-000000000000") == {}
    except SevenLeagueError:
        return False


def wait_until(condition: Callable[[], bool], complaint: str) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.1)


def end_with_children(process: subprocess.Popen[bytes]) -> None:
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for each in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def commits(output: Path) -> dict[str, float]:
    return {path.name: path.stat().st_mtime for path in output.glob("_commits/*.json")}


def rows_of(output: Path) -> list[tuple[Any, ...]]:
    """What readers see, without what tells runs apart."""
    manifest = json.loads((output / "_manifest.json").read_text())
    rows = [row for part in manifest["parts"] for row in pq.read_table(output / part["path"]).to_pylist()]
    return sorted(
        (row["id"], row["sample_index"], str(row["generation"]), str(row["completion_token_ids"])) for row in rows
    )


def marked_wheel(path: Path) -> Path:
    """A wheel of this tree whose code says where it comes from."""
    with zipfile.ZipFile(path, "w") as wheel:
        for package in ("pipeline", "workers", "jobs"):
            for file in sorted((ROOT / package).rglob("*.[pch]*")):
                if "__pycache__" not in file.parts and file.relative_to(ROOT) != Path("jobs/__init__.py"):
                    wheel.write(file, file.relative_to(ROOT))
        wheel.writestr("jobs/__init__.py", "print('this is the wheel', flush=True)\n")
        wheel.writestr("sevenleague-0.dist-info/METADATA", "Name: sevenleague\n")
    return path


@pytest.mark.ray
def test_a_job_that_is_stopped_and_submitted_again_gives_the_data_of_an_undisturbed_one(
    head: str,
    make_job: MakeJob,
    run_here: Callable[[Any], None],
    capsys: pytest.CaptureFixture[str],
    start_cli: StartCli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")  # Ray would prefer it to --address
    calm = make_job(PROMPTS, name="calm", **SLOW)
    job = make_job(calm.file.with_suffix(".parquet"), name="disturbed", **SLOW)
    key = job_key(str(job.output))

    run_here(calm)
    submit_twice(head, job, tmp_path, capsys, monkeypatch)
    follower = start_cli("logs", job.output, "--address", head, "--follow")
    wait_until(lambda: len(commits(job.output)) >= 2, "no commits")
    interrupt(follower, f"{key}-1")
    assert not RayJobs(head).find(str(job.output)).status.is_terminal()

    code, shown, _ = call(capsys, "stop", job.output, "--address", head)
    assert (code, shown.splitlines()[-1]) == (
        0,
        f"{key}-1 is stopped; submit the same job again to resume what is left",
    )
    drained = commits(job.output)
    assert 0 < len(drained) < SHARDS
    assert status_of(str(job.output)).state == "interrupted"
    code, shown, _ = call(capsys, "logs", job.file, "--address", head, "--follow")
    assert code == ExitCode.INTERRUPTED
    assert "this is the wheel\n" in shown
    assert "Interrupted; run the same command again to resume." in shown

    code, shown, _ = call(capsys, "submit", job.file, "--address", head, "--follow")
    assert code == ExitCode.FAILED_ROWS, shown
    assert shown.startswith(f"submitted {key}-2\n")
    assert "this is the wheel" not in shown
    assert drained.items() <= commits(job.output).items(), "a committed shard was committed again"
    assert len(list(job.output.glob("data/*"))) == SHARDS
    assert rows_of(job.output) == rows_of(calm.output)
    code, _, said = call(capsys, "stop", job.file, "--address", head)
    assert (code, said.count("\n")) == (ExitCode.USER_ERROR, 1)
    assert said == f"sevenleague: a job to stop must be pending or running, got {key}-2, which is failed\n"


def submit_twice(
    head: str, job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one is refused, also where it does not know of the first. Variables travel if they are named."""
    monkeypatch.setenv("SL_TEST_KEY", "hush-hush")
    monkeypatch.setenv("SL_OTHER_KEY", "not asked for")
    wheel = marked_wheel(tmp_path / "sevenleague-0-py3-none-any.whl")
    job_id = f"{job_key(str(job.output))}-1"
    code, shown, said = call(capsys, "submit", job.file, "--address", head, "--wheel", wheel, "--env", "SL_TEST_KEY")
    assert (code, shown.splitlines()[0]) == (0, f"submitted {job_id}"), said
    assert "hush-hush" not in shown + said
    jobs = RayJobs(head)
    variables = jobs.details(job_id).runtime_env["env_vars"]
    assert variables["SL_TEST_KEY"] == "hush-hush"
    assert "SL_OTHER_KEY" not in variables
    assert variables["RAY_JOB_STOP_WAIT_TIME_S"] == "60"  # Ray alone would kill a driver 3 s after SIGTERM

    refusal = f"output.path must have no job that is pending or running, got '{job.output}' of {job_id}"
    code, _, said = call(capsys, "submit", job.file, "--address", head)
    assert code == ExitCode.USER_ERROR
    assert said.startswith(f"sevenleague: {refusal}, which is ")
    assert said.count("\n") == 1
    monkeypatch.setattr(jobs, "attempts", lambda key: {})
    staged = tmp_path / "staged"
    staged.mkdir()
    with pytest.raises(ConfigError, match=f"^{re.escape(refusal)}, submitted at the same time$"):
        jobs.submit(str(job.output), staged, {})


def interrupt(follower: subprocess.Popen[str], job_id: str) -> None:
    """Ctrl-C for who follows a log; the job must not notice."""
    assert follower.stdout is not None
    assert any(f"job {job_id}" in line for line in iter(follower.stdout.readline, ""))
    follower.send_signal(signal.SIGINT)
    _, said = follower.communicate(timeout=30)
    assert (follower.returncode, said.split(";")[0]) == (ExitCode.INTERRUPTED, f"sevenleague: {job_id} goes on")


def test_an_id_is_decided_by_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = job_key("s3://bucket/runs/My Summaries/")
    assert key == job_key("s3://bucket/runs/My Summaries")
    assert key.startswith("my-summaries-")
    assert key != job_key("s3://bucket/other/My Summaries")
    assert split_id(f"{key}-12") == (key, 12)
    assert [split_id(text) for text in (key, f"{key}-0", "out/quickstart", "job.yaml")] == [None] * 4
    monkeypatch.chdir(tmp_path)
    assert job_key("out") == job_key(str(tmp_path / "out"))
    assert split_id(f"{job_key('/')}-1") is not None


def test_local_paths_hold_on_the_cluster_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    data = {"input": ["in/*.parquet", "s3://b/x.parquet"], "output": "out", "cluster": {"address": "head:6379"}}
    moved = for_cluster(parse_job({**data, "model": "model"}))
    assert moved.model.id == str(tmp_path / "model")
    assert moved.input.path == (str(tmp_path / "in/*.parquet"), "s3://b/x.parquet")
    assert moved.output.path == str(tmp_path / "out")
    assert moved.cluster.address == "auto"
    decoding = {"strategy": "draft_model", "model": "Qwen/Qwen3-0.6B"}
    hub = for_cluster(
        parse_job({"model": "Qwen/Qwen3-8B", "input": {"path": "org/set", "format": "datasets"}, "output": "o"}),
    )
    assert (hub.model.id, hub.input.path) == ("Qwen/Qwen3-8B", ("org/set",))
    assert for_cluster(parse_job({**data, "model": "model", "decoding": decoding})).decoding.model == "Qwen/Qwen3-0.6B"


def test_only_the_code_and_the_job_travel(make_job: MakeJob, tmp_path: Path) -> None:
    job = load_job(str(make_job(PROMPTS).file))
    folder = tmp_path / "staged"
    folder.mkdir()
    stage(folder, job, None)
    assert {path.name for path in folder.iterdir()} == {"pipeline", "workers", "jobs", "sevenleague.py", JOB_FILE}
    assert load_job(str(folder / JOB_FILE)) == job
    assert (folder / "workers" / "native").is_dir()
    assert not list(folder.rglob("__pycache__"))
    assert sum(path.stat().st_size for path in folder.rglob("*")) < 4 * 2**20


def test_mistakes_show_before_anything_is_sent(
    make_job: MakeJob, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def mistake(*arguments: str | Path) -> str:
        code, shown, said = call(capsys, *arguments)
        assert (code, shown, said.count("\n")) == (ExitCode.USER_ERROR, "", 1)
        return said.removeprefix("sevenleague: ").strip()

    job, nowhere = make_job(PROMPTS), ("--address", "http://127.0.0.1:1")
    refused = "--address must be the http://host:port of a running Ray head, got "
    assert mistake("submit", job.file, *nowhere, "--top-p=2") == "sampling.top_p must be in (0, 1], got 2.0"
    assert mistake("submit", job.file, *nowhere, "--env=SL_UNSET") == (
        "--env must name a variable that is set here, got 'SL_UNSET'"
    )
    assert mistake("submit", job.file, *nowhere, "--wheel", job.file).startswith(
        "--wheel must be a readable wheel, got"
    )
    other = tmp_path / "other.whl"
    zipfile.ZipFile(other, "w").close()
    assert mistake("submit", job.file, *nowhere, "--wheel", other).endswith("without pipeline, workers, jobs")
    for command in ("submit", "stop", "logs"):
        assert mistake(command, job.file, *nowhere) == f"{refused}'http://127.0.0.1:1': [Errno 111] Connection refused"
    assert mistake("stop", "out/x", "--address", "head:8265") == f"{refused}'head:8265': no http address"


@pytest.mark.ray
def test_doctor_reaches_the_head(head: str, tiny_model_dir: Callable[[str], Path]) -> None:
    (ray,) = [found for found in findings(None, str(tiny_model_dir("llama")), head) if found.name == "Ray"]
    assert (ray.state, ray.found) == ("ok", f"{head}: takes jobs (sevenleague submit)")


@pytest.mark.ray
def test_who_has_not_the_token_is_told_at_once(
    head: str,
    ports: tuple[int, int],
    make_job: MakeJob,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remedy = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or ~/.ray/auth_token to the token of the cluster"
    with ray_token(secrets.token_hex(32)):
        code, _, said = call(capsys, "submit", make_job(PROMPTS).file, "--address", head)
    assert (code, said) == (
        ExitCode.USER_ERROR,
        f"sevenleague: --address must be of a Ray cluster whose token is set here, got {head!r}: {remedy}\n",
    )
    monkeypatch.delenv("RAY_AUTH_MODE")
    address = f"127.0.0.1:{ports[0]}"
    code, _, said = call(capsys, "run", make_job(PROMPTS, cluster={"address": address}).file)
    assert (code, said) == (
        ExitCode.USER_ERROR,
        f"sevenleague: cluster.address must be of a Ray cluster whose token is set here, got {address!r}: {remedy}\n",
    )


def test_exit_codes_are_those_of_the_job() -> None:
    def code(status: str, driver: int | None = None, message: str | None = None) -> ExitCode:
        job = SimpleNamespace(
            status=SimpleNamespace(value=status), driver_exit_code=driver, message=message, submission_id="x-1"
        )
        return exit_code_of(job)  # type: ignore[arg-type]

    assert code("SUCCEEDED", 0) == ExitCode.DONE
    assert [code("FAILED", number) for number in (1, 2, 3, 4, -9)] == [1, 2, 3, 4, 1]
    assert code("STOPPED") == ExitCode.INTERRUPTED
    with pytest.raises(PermanentError, match=r"^the job x-1 could not run: no space$"):
        code("FAILED", None, "no space\nTraceback")
