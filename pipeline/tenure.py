"""One driver at a time on an output: who holds it says so in `_driver.json` again and again, by its heartbeat.

A driver that finds another's heartbeat watches whether it goes on. Only its change counts, so the clocks of two
machines are never compared. What two drivers do in the short time before one of them notices is wasted, never wrong: a
shard is committed once, whoever decoded it.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.commits import DriverState, JobStore
from pipeline.errors import ConfigError, SevenLeagueError
from pipeline.faults import patience

HEARTBEAT_S = 5.0
HEARTBEATS_WATCHED = 2.5
_PATIENCE_S = 2.0
"""A heartbeat only informs; the loop does not wait long for a store that is away."""

logger = logging.getLogger(__name__)


class Tenure:
    """A driver's hold of an output. The methods raise ConfigError when another driver has it."""

    def __init__(self, store: JobStore, run_id: str, pause: Callable[[float], None] = time.sleep) -> None:
        self._store = store
        self._run_id = run_id
        self._pause = pause
        self._seen: Mapping[str, Any] | None = None
        self._has_begun = False
        self._next_at = 0.0

    def wait_for_it(self) -> None:
        """Return when no other driver is alive on the output: at once when one on this machine has died."""
        self._seen = self._store.beat()
        if self._seen is None or self._seen["state"] != "running" or _is_dead(self._seen):
            return
        for _ in range(5):
            self._pause(HEARTBEATS_WATCHED * HEARTBEAT_S / 5)
            self._refuse_another()

    def begin(self) -> None:
        """The job is made; from now on `beat` says that it runs."""
        if not self._has_begun:
            self._refuse_another()
            self._has_begun = True

    def beat(self) -> None:
        if self._has_begun and time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + HEARTBEAT_S
            self._refuse_another()
            self._say("running", "")

    def end(self, state: DriverState, message: str = "") -> None:
        if self._has_begun:
            self._say(state, message)

    def _refuse_another(self) -> None:
        """Raise ConfigError where another driver has said something since this one last looked."""
        try:
            with patience(_PATIENCE_S):
                found = self._store.beat()
        except (SevenLeagueError, OSError) as error:
            logger.warning("whether another driver is at work could not be read: %s", error)
            return
        if found is None or found["state"] != "running" or found == self._seen or found["run_id"] == self._run_id:
            return
        self._has_begun = False  # the output is the other's: nothing more is said of this run
        raise ConfigError(
            f"output.path must have one driver at a time, got another one at work on {self._store.output!r} "
            f"(process {found.get('pid')} on {found.get('host')}); this one stops"
        )

    def _say(self, state: DriverState, message: str) -> None:
        """Tell storage how the driver is. It only informs, so a fault of the store is no reason to stop."""
        try:
            with patience(_PATIENCE_S):
                self._store.set_state(state, self._run_id, message)
        except (SevenLeagueError, OSError) as error:
            logger.warning("the driver's state could not be written: %s", error)


def _is_dead(beat: Mapping[str, Any]) -> bool:
    """Whether the driver was a process of this machine that is gone."""
    if beat.get("host") != socket.gethostname() or not isinstance(beat.get("pid"), int):
        return False
    try:
        os.kill(beat["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
