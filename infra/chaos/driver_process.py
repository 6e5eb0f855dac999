"""The driver of a job as a process that is started, ended and started again, each time with a log of its own."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from infra.chaos.site import COMMAND, ROOT

DONE, FAILED_ROWS, INTERRUPTED = 0, 3, 4
"""Exit codes of `sevenleague run`."""


class DriverProcess:
    """`sevenleague run JOB.yaml`; `log` is what the latest start has said."""

    def __init__(self, job_file: Path, environment: Mapping[str, str]) -> None:
        self._command = [*COMMAND, "run", str(job_file)]
        self._folder = job_file.parent
        self._environment = {**os.environ, **environment}
        self._numbers = itertools.count(1)
        self.start()

    def start(self) -> None:
        self.log = self._folder / f"driver-{next(self._numbers)}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=ROOT,
                env=self._environment,
            )

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """As `poll`, but gives it some time to end."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def last_line(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "(nothing was said)"
