"""Runs jobs one after the other, with nothing in their way: python -m infra.chaos.undisturbed JOB.yaml .."""

from __future__ import annotations

import sys

from jobs.ray_session import ray_session
from jobs.run import run_job
from pipeline.config_io import load_job


def main(files: list[str]) -> None:
    with ray_session(load_job(files[0])):
        for file in files:
            summary = run_job(file)
            if summary.state != "done" or summary.rows_failed:
                sys.exit(f"{file} did not run to its end: {summary.to_json()}")


if __name__ == "__main__":
    main(sys.argv[1:])
