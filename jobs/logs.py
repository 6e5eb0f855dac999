"""`sevenleague logs`: what a submitted job has printed, or prints."""

from __future__ import annotations

from jobs.exit_codes import ExitCode
from jobs.ray_jobs import RayJobs
from jobs.submit import follow


def command(name: str, address: str, *, follows: bool) -> ExitCode:
    """The CLI command."""
    jobs = RayJobs(address)
    job_id = str(jobs.find(name).submission_id)
    if follows:
        return follow(jobs, job_id)
    print(jobs.log(job_id), end="")
    return ExitCode.DONE
