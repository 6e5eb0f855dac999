"""`sevenleague stop`: a submitted job drained and ended."""

from __future__ import annotations

from jobs.exit_codes import ExitCode
from jobs.ray_jobs import RayJobs
from pipeline.errors import ConfigError


def command(name: str, address: str) -> ExitCode:
    """The CLI command; it waits until the job has ended. Ctrl-C ends the waiting alone."""
    jobs = RayJobs(address)
    job = jobs.find(name)
    job_id = str(job.submission_id)
    if job.status.is_terminal():
        raise ConfigError(
            f"a job to stop must be pending or running, got {job_id}, which is {job.status.value.lower()}"
        )
    jobs.stop(job_id)
    print(f"stopping {job_id}: no new shards; those that run have time to finish", flush=True)
    ended = jobs.wait(job_id)
    print(f"{job_id} is {ended.status.value.lower()}; submit the same job again to resume what is left")
    return ExitCode.DONE
