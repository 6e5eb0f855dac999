"""What the driver asks of Ray itself: answers, machines, whether the cluster is still there, the end of a worker.

A driver that has lost the head of its cluster would wait in Ray for a minute, and then Ray ends the process without a
word. So the machines are asked for in a thread of its own, and the driver stops by itself when no answer comes.
"""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import NodeDiedError, RayError, RayTaskError

from pipeline.errors import ConfigError, ConnectionLost, PermanentError, TransientError

POLL_S = 2.0
FRESH_S = 10.0
LOST_S = 30.0
"""Silence after which the cluster counts as lost: below the 60 s after which Ray ends this process."""

logger = logging.getLogger(__name__)


class WorkerDied(Exception):
    """The process of a worker ended, or cannot be reached, while it owed an answer."""


def answer(ref: ray.ObjectRef[Any]) -> Any:
    """What a worker answers. Its own errors are raised plainly; the end of its process is a WorkerDied."""
    try:
        return ray.get(ref)
    except RayTaskError as error:
        if isinstance(error.cause, ConfigError | PermanentError | TransientError):
            raise error.cause from error
        raise PermanentError(
            f"a worker met an error that it should have handled: {type(error.cause).__name__}: {error.cause}"
        ) from error
    except RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise WorkerDied(f"{type(error).__name__}: {lines[-1] if lines else 'no reason given'}") from error


def ready_among(refs: list[ray.ObjectRef[Any]], timeout_s: float) -> list[ray.ObjectRef[Any]]:
    """All answers that are there; where none is, the first within the time."""
    ready = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0]
    return ready or ray.wait(refs, num_returns=1, timeout=timeout_s, fetch_local=False)[0]


def kill(handle: ActorHandle[Any]) -> None:
    """End a worker's process, also a stopped one; what it owed fails at once."""
    ray.kill(handle)


def node_id(_: Any) -> str:
    """To be called inside a worker: the machine that it runs on."""
    return str(ray.get_runtime_context().get_node_id())


class Nodes:
    """The machines of the cluster, as a thread of its own sees them every few seconds."""

    def __init__(self) -> None:
        self._own = ray.get_runtime_context().get_node_id()
        self._told: list[dict[str, Any]] = []
        self._told_at = self._lost_at = 0.0
        self._wanted = threading.Event()
        self._changed = threading.Condition()
        self._is_closed = False
        self._look()
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self._thread.start()

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_closed = True
        self._wanted.set()
        if self.is_reachable:  # else the thread waits for a head that is gone
            self._thread.join(timeout=POLL_S)

    @property
    def resources(self) -> list[dict[str, float]]:
        """What each machine has in all."""
        return [node["Resources"] for node in self._told if node["Alive"]]

    @property
    def is_reachable(self) -> bool:
        return time.monotonic() - self._told_at < FRESH_S

    def check(self) -> None:
        """Raise ConnectionLost when the cluster is gone."""
        silent_s = time.monotonic() - self._told_at
        if silent_s > LOST_S:
            raise ConnectionLost(f"the Ray cluster has not answered for {silent_s:.0f} s")
        if self._told and self._own not in self._alive():
            raise ConnectionLost("the Ray node that this driver is connected to has died")

    def is_gone(self, node: str | None, since: float, error: BaseException | None) -> bool:
        """Whether a worker was lost with its machine, by what is known a moment after its end.

        One that has not told its machine yet may have been on any that was lost `since` it was started.
        """
        if isinstance(error, NodeDiedError):
            return True
        asked_at = time.monotonic()
        self._wanted.set()
        with self._changed:
            self._changed.wait_for(lambda: self._told_at > asked_at, timeout=FRESH_S)
        return self._lost_at > since if node is None else node not in self._alive()

    def _alive(self) -> set[str]:
        return {node["NodeID"] for node in self._told if node["Alive"]}

    def _run(self) -> None:
        while not self._is_closed:
            try:
                self._look()
            except Exception as error:
                logger.warning("the Ray cluster could not be asked for its nodes: %s", error)
            self._wanted.wait(POLL_S)
            self._wanted.clear()

    def _look(self) -> None:
        told = ray.nodes()  # type: ignore[no-untyped-call]
        with self._changed:
            before = self._alive()
            self._told, self._told_at = told, time.monotonic()
            if before - self._alive():
                self._lost_at = self._told_at
            self._changed.notify_all()
