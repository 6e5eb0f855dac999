"""`sevenleague submit`: a job sent to a Ray cluster, which runs it on its own."""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jobs.exit_codes import ExitCode
from jobs.ray_jobs import RayJobs, exit_code_of
from jobs.submission import for_cluster, stage
from pipeline.config import JobConfig
from pipeline.config_io import load_job
from pipeline.errors import ConfigError
from pipeline.redaction import without_credentials

STOP_MARGIN_S = 30
"""After its grace time a driver still commits, says that it is interrupted and takes its workers down."""


def command(
    job_file: str, overrides: Sequence[str], address: str, wheel: str | None, variables: Sequence[str], *, follows: bool
) -> ExitCode:
    """The CLI command. Mistakes in the job file show before the cluster is asked."""
    config = for_cluster(load_job(job_file, overrides))
    environment = {**chosen_variables(variables), **driver_variables(config)}
    output = config.output.path
    with tempfile.TemporaryDirectory(prefix="sevenleague-") as folder:
        stage(Path(folder), config, wheel)
        jobs = RayJobs(address)
        job_id = jobs.submit(output, Path(folder), environment)
    print(f"submitted {job_id}", flush=True)
    if follows:
        return follow(jobs, job_id)
    shown = without_credentials(output)
    print(f"follow it: sevenleague logs {shown} --address {jobs.address} --follow")
    print(f"stop it:   sevenleague stop {shown} --address {jobs.address}")
    return ExitCode.DONE


def follow(jobs: RayJobs, job_id: str) -> ExitCode:
    """Show a job's log until it ends; its exit code. Ctrl-C ends the following alone."""
    try:
        job = jobs.follow(job_id, _show)
    except KeyboardInterrupt:
        print(
            f"sevenleague: {job_id} goes on; follow it again: sevenleague logs {job_id} --address {jobs.address} "
            f"--follow; stop it: sevenleague stop {job_id} --address {jobs.address}",
            file=sys.stderr,
        )
        return ExitCode.INTERRUPTED
    if job.status.value == "STOPPED":
        print(f"sevenleague: {job_id} was stopped; submit the same job again to resume", file=sys.stderr)
    return exit_code_of(job)


def chosen_variables(names: Sequence[str]) -> dict[str, str]:
    """Environment variables to pass on. No value is ever shown, nor passed unless it is named."""
    for name in names:
        if name not in os.environ:
            raise ConfigError(f"--env must name a variable that is set here, got {name!r}")
    return {name: os.environ[name] for name in names}


def driver_variables(config: JobConfig) -> dict[str, str]:
    """What Ray is told about a job by variables: the time between SIGTERM and SIGKILL of a stop (3 s unless said
    otherwise), and to take the variables of a job's workers also where the job has them.
    """
    stop_s = math.ceil(config.cluster.grace_s) + STOP_MARGIN_S
    return {"RAY_JOB_STOP_WAIT_TIME_S": str(stop_s), "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1"}


def _show(text: str) -> None:
    print(text, end="", flush=True)
