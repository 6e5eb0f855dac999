"""Which workers no longer do anything: an engine that stands still, a process or a machine that does not answer."""

from __future__ import annotations

from pipeline.fleet import Worker

START_S = 120.0
"""A process that has never answered may be about to start; it is given as long as this at least."""


def silence(worker: Worker, now: float, hang_timeout_s: float) -> str | None:
    """Why a worker is taken for hung; None when it is not."""
    if worker.progress is not None and worker.progress.stalled_s > hang_timeout_s:
        return f"the engine has finished no step for {worker.progress.stalled_s:.0f} s"
    if worker.asked is None:
        return None
    waited = now - worker.asked_at
    if waited > (hang_timeout_s if worker.progress is not None else max(hang_timeout_s, START_S)):
        return f"the worker has not answered for {waited:.0f} s"
    return None
