"""The tasks that a worker has in hand, and how they end early: one of them withdrawn, or all when the worker drains."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from pipeline.errors import Withdrawn

CANCEL_S = 10.0
"""What tasks that were withdrawn take to end, at most."""


class Task:
    """What a task waits for. Once it is withdrawn, all of it is cancelled and nothing more is begun."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._awaited: list[Future[Any]] = []
        self._is_withdrawn = False

    def awaits(self, future: Future[Any]) -> None:
        with self._lock:
            self._awaited.append(future)
            if self._is_withdrawn:
                future.cancel()

    def check(self) -> None:
        """Raise Withdrawn once it is."""
        if self._is_withdrawn:
            raise Withdrawn("the worker has given the shard back")

    def cancel(self) -> None:
        """Nobody waits for its futures any more."""
        with self._lock:
            for future in self._awaited:
                future.cancel()

    def withdraw(self) -> None:
        with self._lock:
            self._is_withdrawn = True
        self.cancel()


class Tasks:
    """All tasks of a worker, by the name of the part that each of them makes."""

    def __init__(self) -> None:
        self._tasks: dict[str, Task] = {}
        self._changed = threading.Condition()
        self._is_draining = False

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def are_in_hand(self) -> bool:
        return bool(self._tasks)

    @contextmanager
    def in_hand(self, name: str) -> Iterator[Task]:
        """Raises Withdrawn at once when the worker drains."""
        task = Task()
        with self._changed:
            if self._is_draining:
                raise Withdrawn("the worker drains and takes no more shards")
            self._tasks[name] = task
        try:
            yield task
        finally:
            task.cancel()
            with self._changed:
                del self._tasks[name]
                self._changed.notify_all()

    def withdraw(self, name: str) -> None:
        """End a task early; nothing happens when it has ended."""
        task = self._tasks.get(name)
        if task is not None:
            task.withdraw()

    def drain(self, grace_s: float) -> None:
        """Take no more tasks, and return when none is in hand: after `grace_s` seconds those that are left go back."""
        with self._changed:
            self._is_draining = True
            self._changed.wait_for(lambda: not self._tasks, timeout=grace_s)
            left = list(self._tasks.values())
        for task in left:
            task.withdraw()
        with self._changed:
            self._changed.wait_for(lambda: not self._tasks, timeout=CANCEL_S)
