"""The jobs of a Ray cluster, through the HTTP address of its head (Ray's Jobs API)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from jobs.exit_codes import ExitCode
from jobs.ray_session import CONNECT_S
from jobs.ray_token import refusal
from jobs.submission import ENTRYPOINT, job_key, split_id, submission_id
from pipeline.config_io import load_job
from pipeline.errors import ConfigError, PermanentError, TransientError
from pipeline.faults import patience, retrying
from pipeline.redaction import redacted, without_credentials

if TYPE_CHECKING:
    from ray.dashboard.modules.job.pydantic_models import JobDetails
    from ray.job_submission import JobSubmissionClient

T = TypeVar("T")

POLL_S = 0.5
PATIENCE_S = 10.0
"""How long a head that does not answer is asked again."""

_OTHER_ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Ray prefers them to the address that it is called with."""


class RayJobs:
    """Our jobs on one cluster. Raises ConfigError where no Ray head answers."""

    def __init__(self, address: str) -> None:
        self.address = without_credentials(address)
        self._client = _connected(address)

    def attempts(self, key: str) -> dict[int, JobDetails]:
        """The submissions of a job by their counts."""
        ids = {job.submission_id: job for job in self._ask(self._client.list_jobs) if job.submission_id}
        known = {split_id(name): job for name, job in ids.items()}
        return {split[1]: job for split, job in known.items() if split is not None and split[0] == key}

    def find(self, name: str) -> JobDetails:
        """The last submission of a job, by output or job file, or the one of an id. Raises ConfigError."""
        key, attempt = _key_of(name)
        attempts = self.attempts(key)
        if not attempts or attempt not in (None, *attempts):
            raise ConfigError(f"the cluster at {self.address} must have the job, got {name!r}, which it has not")
        return attempts[max(attempts) if attempt is None else attempt]

    def submit(self, output: str, working_dir: Path, environment: Mapping[str, str]) -> str:
        """Submit what is staged in a folder; its id. Raises ConfigError while another job writes to the output."""
        key = job_key(output)
        attempts = self.attempts(key)
        for attempt, job in attempts.items():
            if not job.status.is_terminal():
                raise _refusal(output, f"{submission_id(key, attempt)}, which is {job.status.value.lower()}")
        new_id = submission_id(key, max(attempts, default=0) + 1)
        try:
            with self._translated():
                self._client.submit_job(
                    entrypoint=ENTRYPOINT,
                    submission_id=new_id,
                    runtime_env={"working_dir": str(working_dir), "env_vars": dict(environment)},
                    metadata={"output": without_credentials(output)},
                )
        except PermanentError as error:
            if "already exists" in str(error):
                raise _refusal(output, f"{new_id}, submitted at the same time") from error
            raise
        return new_id

    def stop(self, job_id: str) -> None:
        """Ask a job to stop. It stops later."""
        self._ask(lambda: self._client.stop_job(job_id))

    def details(self, job_id: str) -> JobDetails:
        return self._ask(lambda: self._client.get_job_info(job_id))

    def wait(self, job_id: str) -> JobDetails:
        """A job when it has ended."""
        while not (job := self.details(job_id)).status.is_terminal():
            time.sleep(POLL_S)
        return job

    def log(self, job_id: str) -> str:
        return self._ask(lambda: self._client.get_job_logs(job_id))

    def follow(self, job_id: str, show: Callable[[str], None]) -> JobDetails:
        """Show a job's log as it grows; the job when it has ended. A connection that breaks is made again."""
        shown = 0
        while True:
            shown = asyncio.run(self._tail(job_id, shown, show))
            job = self.details(job_id)
            if job.status.is_terminal():
                return job
            time.sleep(POLL_S)

    async def _tail(self, job_id: str, shown: int, show: Callable[[str], None]) -> int:
        """Show a log beyond its first characters; how many are shown when the connection ends."""
        import aiohttp

        seen = 0
        with contextlib.suppress(RuntimeError, aiohttp.ClientError):  # if the head is gone, the next request says so
            async for text in self._client.tail_job_logs(job_id):
                seen += len(text)
                if seen > shown:
                    show(text[shown - seen :])
                    shown = seen
        return shown

    def _ask(self, question: Callable[[], T]) -> T:
        """The answer to a question that may be asked again when none comes."""

        def ask() -> T:
            with self._translated():
                return question()

        with patience(PATIENCE_S):
            return retrying(ask)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # so are all errors of the HTTP client
            raise TransientError(f"the Ray head at {self.address} does not answer: {redacted(str(error))}") from error
        except RuntimeError as error:
            raise PermanentError(f"the Ray head at {self.address} says: {redacted(str(error))}") from error


def exit_code_of(job: JobDetails) -> ExitCode:
    """The exit code of `run` on the cluster. Raises PermanentError with Ray's reason where it was never started."""
    if job.status.value == "SUCCEEDED":
        return ExitCode.DONE
    if job.status.value == "STOPPED":
        return ExitCode.INTERRUPTED
    if job.driver_exit_code is None:
        reason = (job.message or "no reason given").strip().splitlines()[0]
        raise PermanentError(f"the job {job.submission_id} could not run: {reason}")
    known = [code for code in ExitCode if code == job.driver_exit_code]
    return known[0] if known else ExitCode.FAILED


def _key_of(name: str) -> tuple[str, int | None]:
    """Key and count, if it has one, of what names a job: an id, a job file, or an output."""
    split = split_id(name)
    if split is not None and not os.path.exists(name):
        return split
    is_file = name.endswith((".yaml", ".yml"))
    return job_key(load_job(name).output.path if is_file else name), None


def _refusal(output: str, job: str) -> ConfigError:
    return ConfigError(
        f"output.path must have no job that is pending or running, got {without_credentials(output)!r} of {job}"
    )


def _connected(address: str) -> JobSubmissionClient:
    try:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("no http address")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname, port), timeout=CONNECT_S).close()

        from ray.exceptions import AuthenticationError, RayError
        from ray.job_submission import JobSubmissionClient

        for name in ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
            logging.getLogger(name).setLevel(logging.ERROR)
        with _without_variables(_OTHER_ADDRESSES):
            try:
                return JobSubmissionClient(address)
            except AuthenticationError as error:
                raise refusal("--address", without_credentials(address)) from error
            except RayError as error:
                raise ValueError(str(error)) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--address must be the http://host:port of a running Ray head, got {without_credentials(address)!r}: "
            f"{redacted(' '.join(str(error).split()))}"
        ) from error


@contextlib.contextmanager
def _without_variables(names: Iterable[str]) -> Iterator[None]:
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
