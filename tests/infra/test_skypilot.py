"""SkyPilot's task file against a strict model of what it uses; SkyPilot itself needs too much to be installed here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict

ROOT = Path(__file__).parents[2]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Recovery(Strict):
    strategy: Literal["EAGER_NEXT_REGION", "FAILOVER"]
    max_restarts_on_errors: int


class Resources(Strict):
    accelerators: dict[str, int]
    cpus: str
    memory: str
    disk_size: int
    use_spot: bool
    job_recovery: Recovery


class Task(Strict):
    name: str
    num_nodes: int
    workdir: str
    resources: Resources
    envs: dict[str, str]
    setup: str
    run: str


def task() -> Task:
    return Task.model_validate(yaml.safe_load((ROOT / "infra" / "skypilot" / "job.yaml").read_text()))


def test_it_has_the_keys_of_a_task_and_takes_spot_machines() -> None:
    resources = task().resources
    assert resources.use_spot
    assert all(re.fullmatch(r"\d+\+", amount) for amount in (resources.cpus, resources.memory))


def test_its_scripts_are_sound_and_run_what_is_there() -> None:
    for script in (task().setup, task().run):
        shellcheck = Path(sys.executable).parent / "shellcheck"
        done = subprocess.run([shellcheck, "--shell=bash", "-"], input=script, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "")
        for path in re.findall(r"\binfra/\S+", script):
            assert (ROOT / path).exists(), path
    assert (ROOT / task().envs["JOB"]).exists()
    assert "--dashboard-host=127.0.0.1" in task().run
