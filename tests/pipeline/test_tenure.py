"""Who holds an output, with the heartbeats of other drivers written by hand."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.commits import JobStore
from pipeline.errors import ConfigError
from pipeline.tenure import HEARTBEAT_S, HEARTBEATS_WATCHED, Tenure

Beat = Callable[..., None]


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(str(tmp_path))


@pytest.fixture
def other_beats(tmp_path: Path) -> Beat:
    """Another driver, on a machine called `other`, says that it is alive."""

    def beat(heartbeat: float = 1.0, **fields: Any) -> None:
        said = {"state": "running", "run_id": "other", "heartbeat": heartbeat, "host": "other", "pid": 1, **fields}
        (tmp_path / "_driver.json").write_text(json.dumps(said))

    return beat


def never(seconds: float) -> None:
    raise AssertionError("it should not have to wait")


def state(tmp_path: Path) -> tuple[str, str]:
    said = json.loads((tmp_path / "_driver.json").read_text())
    return said["run_id"], said["state"]


def test_an_output_without_a_driver_is_free(store: JobStore, tmp_path: Path) -> None:
    tenure = Tenure(store, "mine", never)
    tenure.wait_for_it()
    tenure.beat()
    assert not (tmp_path / "_driver.json").exists(), "nothing is said before the job is made"
    tenure.begin()
    tenure.beat()
    assert state(tmp_path) == ("mine", "running")
    said = json.loads((tmp_path / "_driver.json").read_text())
    assert (said["host"], said["pid"]) == (socket.gethostname(), os.getpid())
    tenure.end("interrupted", "why")
    assert state(tmp_path) == ("mine", "interrupted")


@pytest.mark.parametrize("ended", ["interrupted", "failed", "done"])
def test_a_driver_that_has_ended_is_followed_at_once(store: JobStore, other_beats: Beat, ended: str) -> None:
    other_beats(state=ended)
    Tenure(store, "mine", never).wait_for_it()


def test_a_dead_process_of_this_machine_is_followed_at_once(store: JobStore, other_beats: Beat) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    other_beats(host=socket.gethostname(), pid=process.pid)
    tenure = Tenure(store, "mine", never)
    tenure.wait_for_it()
    tenure.begin()


def test_a_silent_driver_elsewhere_is_followed_after_a_while(
    store: JobStore, other_beats: Beat, tmp_path: Path
) -> None:
    other_beats()
    waited: list[float] = []
    tenure = Tenure(store, "mine", waited.append)
    tenure.wait_for_it()
    assert sum(waited) == pytest.approx(HEARTBEATS_WATCHED * HEARTBEAT_S)
    tenure.begin()
    tenure.beat()
    assert state(tmp_path) == ("mine", "running")


def test_a_driver_that_is_alive_is_not_disturbed(store: JobStore, other_beats: Beat, tmp_path: Path) -> None:
    other_beats(1.0)
    with pytest.raises(ConfigError) as raised:
        Tenure(store, "mine", lambda seconds: other_beats(2.0)).wait_for_it()
    assert str(raised.value) == (
        f"output.path must have one driver at a time, got another one at work on '{tmp_path}' (process 1 on other); "
        "this one stops"
    )
    assert state(tmp_path) == ("other", "running")


def test_a_driver_that_was_faster_to_begin_is_not_disturbed(store: JobStore, other_beats: Beat) -> None:
    tenure = Tenure(store, "mine", never)
    tenure.wait_for_it()
    other_beats()
    with pytest.raises(ConfigError, match=r"^output\.path must have one driver"):
        tenure.begin()


def test_a_driver_whose_output_was_taken_over_stops_and_says_no_more(
    store: JobStore, other_beats: Beat, tmp_path: Path
) -> None:
    tenure = Tenure(store, "mine", never)
    tenure.wait_for_it()
    tenure.begin()
    other_beats()
    with pytest.raises(ConfigError, match=r"^output\.path must have one driver"):
        tenure.beat()
    tenure.end("failed", "why")
    assert state(tmp_path) == ("other", "running")
