"""The workers of a job: starting them, asking how they are, and putting another in the place of one that has ended.

A handle stands for one process. The driver never lets Ray restart it, since calls to a worker that waits for a machine
after its end would fail, where those to a new one wait. Workers that find no room wait in Ray until there is some, so
they join when machines do, and a cluster that grows by demand sees the demand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.cluster_config import ClusterConfig
from pipeline.elasticity import ShortageNotice
from pipeline.errors import PermanentError, TransientError
from pipeline.fleet import Worker
from pipeline.liveness import silence
from pipeline.ray_link import Nodes, WorkerDied, answer, kill, node_id

PROGRESS_S = 1.0
PROGRESS_CALLS_PER_S = 50
"""However many workers there are, so that asking them costs the loop little."""

LONGEST_START_PAUSE_S = 60.0

logger = logging.getLogger(__name__)

StartWorker = Callable[[int], Any]


class Crew:
    """Workers 0 to `count` - 1. Those that have ended stay until what they owed has been taken in."""

    def __init__(self, cluster: ClusterConfig, nodes: Nodes, start_worker: StartWorker, count: int) -> None:
        self.workers = [Worker(index) for index in range(count)]
        self.is_closing = False
        self.num_replaced = 0
        self._leaving: list[Worker] = []
        self._cluster = cluster
        self._nodes = nodes
        self._start_worker = start_worker
        self._shortage = ShortageNotice(cluster)
        self._progress_period_s = max(PROGRESS_S, count / PROGRESS_CALLS_PER_S)

    def tend(self, now: float) -> None:
        """Start who is to be started, ask who has not been asked for long, end who does nothing any more."""
        for worker in list(self.workers):
            if worker.handle is None:
                if now >= worker.start_at and self._nodes.is_reachable and not self.is_closing:
                    self._start(worker, now)
                continue
            if worker.starting is None and not worker.is_ready and now >= worker.start_at:
                worker.starting = worker.handle.ready.remote()
            if worker.asked is None and now >= worker.asked_at + self._progress_period_s:
                worker.asked, worker.asked_at = worker.handle.progress.remote(), now
            elif (reason := silence(worker, now, self._cluster.hang_timeout_s)) is not None:
                logger.warning("worker-%d is replaced: %s", worker.index, reason)
                worker.ended_by = reason
                self._replace(worker, now)
        self._shortage.see(now, sum(worker.is_placed for worker in self.workers))

    def owners(self) -> dict[Any, Worker]:
        """Everything that is owed, by whom."""
        self._leaving = [worker for worker in self._leaving if worker.flights]
        return {ref: worker for worker in self._all() for ref in worker.refs()}

    def took_in(self, worker: Worker, ref: Any, now: float) -> bool:
        """Whether the answer was about the worker itself: how it is, or where. Tasks and starts are not."""
        if ref not in (worker.asked, worker.locating):
            return False
        is_progress = ref == worker.asked
        try:
            found = answer(ref)
        except WorkerDied as error:
            self.died(worker, error, now)
        else:
            if is_progress:
                worker.progress, worker.asked = found, None
            else:
                worker.node, worker.locating = found, None
        return True

    def started(self, worker: Worker, now: float) -> str | None:
        """The revision of the model that a worker has loaded; None when it failed to and will be tried again."""
        ref, worker.starting = worker.starting, None
        try:
            revision = answer(ref)
        except WorkerDied as error:
            self.died(worker, error, now)
        except TransientError as error:
            worker.start_at = now + self._failed_start(worker, error)
        else:
            worker.is_ready, worker.failed_starts = True, 0
            return str(revision)
        return None

    def died(self, worker: Worker, error: WorkerDied, now: float) -> None:
        """Put another in its place, unless that has been done. Raises PermanentError when none can be started."""
        if worker in self.workers:
            is_failed_start = not worker.is_ready and not self.is_blameless(worker, error)
            self._replace(worker, now, self._failed_start(worker, error) if is_failed_start else 0.0)

    def is_blameless(self, worker: Worker, error: WorkerDied) -> bool:
        """Whether it ended because its machine is lost or it was told to, and not for what it was doing."""
        if worker.ended_by:
            return False
        return worker.is_draining or self._nodes.is_gone(worker.node, worker.started_at, error.__cause__)

    def _failed_start(self, worker: Worker, error: Exception) -> float:
        """Seconds until the next attempt. One bad machine among good ones does not end the job."""
        worker.failed_starts += 1
        sentence = f"worker {worker.index} could not start in {worker.failed_starts} attempts: {error}"
        if worker.failed_starts >= self._cluster.max_attempts and not any(other.is_ready for other in self.workers):
            raise PermanentError(sentence) from error
        logger.warning(sentence)
        return min(2.0**worker.failed_starts, LONGEST_START_PAUSE_S)

    def _replace(self, worker: Worker, now: float, pause_s: float = 0.0) -> None:
        """Another process for one that has ended, or is ended by this. The tasks that it has fail, and are taken in."""
        if finished := worker.undelivered().rows:
            logger.warning("worker-%d ended with about %d finished rows not handed in", worker.index, finished)
        if self._nodes.is_reachable:
            kill(worker.handle)
        self.workers[self.workers.index(worker)] = Worker(
            worker.index, start_at=now + pause_s, failed_starts=worker.failed_starts
        )
        worker.starting = worker.asked = worker.locating = None
        worker.is_ready = False
        self._leaving.append(worker)
        self.num_replaced += 1

    def close(self) -> None:
        """End all processes; a cluster that is out of reach ends them by itself."""
        self.is_closing = True
        if self._nodes.is_reachable:
            for worker in self._all():
                if worker.handle is not None:
                    kill(worker.handle)

    def _all(self) -> Iterator[Worker]:
        yield from self.workers
        yield from self._leaving

    def _start(self, worker: Worker, now: float) -> None:
        worker.started_at = now
        worker.handle = self._start_worker(worker.index)
        worker.locating = worker.handle.__ray_call__.remote(node_id)
        worker.asked, worker.asked_at = worker.handle.progress.remote(), now
