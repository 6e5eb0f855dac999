"""The processes that a run of `make chaos` has started, told by a mark in their environment, and no others.

Ray's processes inherit the mark from the driver or the node that started them, also those whose parent has died.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable

import psutil  # type: ignore[import-untyped]

MARK = "CHAOS_MARK"
_WORKER = "ray::GenerationWorker"
_GONE = (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess)


def marked(mark: str) -> list[psutil.Process]:
    """Living processes whose mark begins with `mark`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(*_GONE):
            if process.environ().get(MARK, "").startswith(mark):
                found.append(process)
    return found


def workers(mark: str, *, also_stopped: bool = False) -> list[psutil.Process]:
    """Generation workers that are not dead."""
    dead = {psutil.STATUS_ZOMBIE} if also_stopped else {psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED}
    return [process for process in marked(mark) if _is_worker(process, dead)]


def _is_worker(process: psutil.Process, dead: set[str]) -> bool:
    with contextlib.suppress(*_GONE):
        return process.status() not in dead and " ".join(process.cmdline()).startswith(_WORKER)
    return False


def tree(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill(processes: Iterable[psutil.Process], wait_s: float = 10.0) -> None:
    """SIGKILL to all, then wait until they are gone."""
    processes = list(processes)
    for process in processes:
        send(process, signal.SIGKILL)
    psutil.wait_procs(processes, timeout=wait_s)


def send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(*_GONE):
        process.send_signal(number)
