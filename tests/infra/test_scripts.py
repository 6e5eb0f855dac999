"""Shell scripts: shellcheck over all, and what those for clusters do, with stand-ins for Ray, Slurm and a cloud.

What ends processes by name runs in a process namespace of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
SCRIPTS = [*sorted(INFRA.rglob("*.sh")), ROOT / ".ci" / "run"]
NAMESPACE = ("unshare", "--fork", "--pid", "--mount-proc")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_shellcheck_is_content(script: Path) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert os.access(script, os.X_OK)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """`stand_in(NAME, SCRIPT)` takes the place of a command; each call of it is noted in the file `calls` first."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def make(name: str, script: str = "") -> None:
        (folder / name).write_text(f'#!/bin/bash\necho {name} "$@" >> {tmp_path}/calls\n{script}\n')
        (folder / name).chmod(0o755)

    return make


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


@pytest.fixture
def namespace() -> tuple[str, ...]:
    if subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("no process namespaces here")
    return NAMESPACE


RAYLET = 'exec -a "/ray/raylet/raylet --node-id=abc123 --x=y" sleep 60 &\n'
WORKER = """bash -c "exec -a ray::GenerationWorker.generate bash {0}/worker.sh" &
until [ -e {0}/ready ]; do sleep 0.02; done
"""


@pytest.mark.parametrize("is_stuck", [False, True])
def test_drain_ends_workers_before_ray(
    is_stuck: bool, namespace: tuple[str, ...], stand_in: Callable[..., None], tmp_path: Path
) -> None:
    """A worker has its time to finish; one that does not in that time is left to Ray."""
    stand_in("ray")
    ending = ":" if is_stuck else f"sleep 0.3; echo finished >> {tmp_path}/calls; exit"
    (tmp_path / "worker.sh").write_text(f"trap '{ending}' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done")
    script = RAYLET + WORKER.format(tmp_path) + f"{INFRA}/ray/drain.sh 1"
    began = time.monotonic()
    done = subprocess.run([*namespace, "bash", "-c", script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    drain = (
        "ray drain-node --node-id abc123 --reason DRAIN_NODE_REASON_PREEMPTION --reason-message the machine goes "
        "--deadline-remaining-seconds 1"
    )
    finished = [] if is_stuck else ["finished"]
    assert calls(tmp_path) == [drain, *finished, "ray stop --grace-period 5"]
    assert not is_stuck or time.monotonic() - began >= 1


class Metadata(BaseHTTPRequestHandler):
    """The metadata service of both clouds; the machine is to go from the third question on."""

    questions = 0

    def do_PUT(self) -> None:
        assert self.path == "/latest/api/token"
        self._answer(200, b"my-token")

    def do_GET(self) -> None:
        Metadata.questions += 1
        goes = Metadata.questions > 2
        if self.path == "/latest/meta-data/spot/instance-action":
            assert self.headers["X-aws-ec2-metadata-token"] == "my-token"
            self._answer(200 if goes else 404, b'{"action": "terminate"}')
        else:
            assert self.path == "/computeMetadata/v1/instance/preempted"
            assert self.headers["Metadata-Flavor"] == "Google"
            self._answer(200, b"TRUE" if goes else b"FALSE")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def metadata_url() -> Iterator[str]:
    Metadata.questions = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_a_spot_machine_is_drained_when_its_cloud_says_so(
    cloud: str, namespace: tuple[str, ...], metadata_url: str, stand_in: Callable[..., None], tmp_path: Path
) -> None:
    stand_in("ray")
    done = subprocess.run(
        [*namespace, INFRA / "ray" / "spot_watch.sh", cloud, "1"],
        env={**os.environ, "METADATA_URL": metadata_url, "POLL_S": "0.05", "TMPDIR": str(tmp_path)},
        timeout=30,
    )
    assert done.returncode == 0
    assert Metadata.questions == 3
    assert calls(tmp_path) == ["ray stop --grace-period 5"]


SLURM = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(ROOT)}


def start_slurm(stand_in: Callable[..., None], driver: str) -> subprocess.Popen[bytes]:
    stand_in("scontrol", '[ "$1" = show ] && printf "n1\\nn2\\n"; true')
    stand_in("srun")
    stand_in("python")
    stand_in("sevenleague", driver)
    command = [INFRA / "slurm" / "run.sh", "job.yaml", "--set", "sampling.seed=1"]
    return subprocess.Popen(command, env={**os.environ, **SLURM})


def test_slurm_starts_ray_on_all_nodes_and_then_the_job(stand_in: Callable[..., None], tmp_path: Path) -> None:
    driver = f"until [ $(grep -c ^srun {tmp_path}/calls) = 2 ]; do sleep 0.02; done; exit 3"
    assert start_slurm(stand_in, driver).wait(timeout=30) == 3
    on_node = "srun --overlap --nodes=1 --ntasks=1 --nodelist="
    metrics = "--metrics-export-port=8080"
    assert sorted(calls(tmp_path)) == sorted(
        [
            "scontrol show hostnames n[1-2]",
            f"{on_node}n1 ray start --block --head --port=6379 --dashboard-host=127.0.0.1 {metrics}",
            f"{on_node}n2 ray start --block --address=n1:6379 {metrics}",
            f"python {ROOT}/infra/ray/wait_for_nodes.py n1:6379 2",
            "sevenleague run job.yaml --set sampling.seed=1 --set cluster.address=n1:6379",
        ]
    )


def test_slurm_puts_an_interrupted_job_into_the_queue_again(stand_in: Callable[..., None], tmp_path: Path) -> None:
    """The SIGTERM at the end of the time reaches the driver, which drains; its exit code says that more is left."""
    driver = f"trap 'sleep 0.2; echo drained >> {tmp_path}/calls; exit 4' TERM\ntouch {tmp_path}/ready\n"
    process = start_slurm(stand_in, driver + "while :; do sleep 0.05; done")
    deadline = time.monotonic() + 20
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.terminate()
    assert process.wait(timeout=30) == 4
    assert calls(tmp_path)[-2:] == ["drained", "scontrol requeue 7"]
