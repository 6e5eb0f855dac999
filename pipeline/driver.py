"""The loop: tasks out, receipts in, commits. Rows never pass through here, only metadata.

An actor has at most two tasks in flight, so that its slots never run dry between shards; a shard that has ended a
worker before gets one for itself (see `retries` for what follows from what). The driver starts actors through
`start_worker` and expects of them: `ready() -> str` (the model's revision; waits for the model), `generate(task) ->
PartReceipt`, `probe(task, start_row, num_rows) -> None` (dead rows left out), `fail_rows(task, error_type, message) ->
PartReceipt`, and `progress() -> WorkerProgress`, which never waits. Ray may restart their processes but must not repeat
calls.

SIGTERM and Ctrl-C drain: no new tasks, those in flight have `DRAIN_S` seconds to finish and be committed; a second one
stops at once. Whatever happens, what is committed stays, and the next run of the same job goes on from there.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from pipeline import retries
from pipeline.commits import JobStore
from pipeline.config import ClusterConfig
from pipeline.errors import ConfigError, PermanentError, TransientError
from pipeline.faults import retrying
from pipeline.fleet import Flight, Tally, Worker, tally_of
from pipeline.preparation import Prepared
from pipeline.records import PartReceipt, Progress, ProgressCallback, ShardTask
from pipeline.retries import Generate, GiveUp, Probe, Troubles
from pipeline.signals import on_first_signal
from pipeline.summary import JobSummary, summarise

TASKS_IN_FLIGHT = 2
DRAIN_S = 30.0
HEARTBEAT_S = 5.0
PROGRESS_S = 1.0
_POLL_S = 0.25

logger = logging.getLogger(__name__)
StartWorker = Callable[[int], ActorHandle[Any]]


def run(prepared: Prepared, start_worker: StartWorker, on_progress: ProgressCallback) -> JobSummary:
    """Generate what remains of a job and finish it, in the Ray session that the caller has opened.

    The summary's state is `done`, or `interrupted` after a drain. Raises ConfigError and PermanentError where the job
    cannot go on, TransientError where the store stays away; each leaves the job resumable. With nothing remaining Ray
    is not touched.
    """
    store = JobStore(prepared.config.output.path)
    receipts = dict(prepared.receipts)
    if prepared.remaining:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        check_resources(prepared.config.cluster, nodes)
        _Run(prepared, store, receipts, start_worker, on_progress).run()
    is_done = len(receipts) == len(prepared.plan.shards)
    summary = summarise(receipts.values(), prepared.plan, prepared.config, "done" if is_done else "interrupted")
    if is_done:
        retrying(lambda: store.finish(prepared.config, receipts.values(), summary.metrics()))
    return summary


def check_resources(cluster: ClusterConfig, nodes: Sequence[Mapping[str, float]]) -> None:
    """Raise ConfigError for what the machines of the cluster cannot give; Ray itself would wait for it forever.

    `nodes` are the resources of each machine, under Ray's names.
    """
    for key, name, wanted in (
        ("gpus_per_worker", "GPU", cluster.gpus_per_worker),
        ("cpus_per_worker", "CPU", cluster.cpus_per_worker),
    ):
        total = sum(node.get(name, 0.0) for node in nodes)
        if wanted * cluster.workers > total:
            raise ConfigError(
                f"cluster.{key} asks for {wanted * cluster.workers:g} {name}s in all ({wanted:g} for each of "
                f"{cluster.workers} workers), the cluster has {total:g}"
            )
        largest = max((node.get(name, 0.0) for node in nodes), default=0.0)
        if wanted > largest:
            raise ConfigError(f"cluster.{key} asks for {wanted:g} {name}s of one machine, the largest has {largest:g}")


class _WorkerDied(Exception):
    """The process of an actor ended, or cannot be reached, while it owed an answer."""


class _Run:
    """One run of the loop. `receipts` is the caller's and fills up as shards are committed."""

    def __init__(
        self,
        prepared: Prepared,
        store: JobStore,
        receipts: dict[int, PartReceipt],
        start_worker: StartWorker,
        on_progress: ProgressCallback,
    ) -> None:
        self._config = prepared.config
        self._plan = prepared.plan
        self._store = store
        self._receipts = receipts
        self._start_worker = start_worker
        self._on_progress = on_progress
        self._max_attempts = prepared.config.cluster.max_attempts
        self._run_id = uuid.uuid4().hex[:8]
        self._began = time.monotonic()
        self._waiting = deque(shard.index for shard in prepared.remaining)
        self._not_before: dict[int, float] = {}
        self._troubles = {shard.index: Troubles() for shard in prepared.remaining}
        self._workers: list[Worker] = []
        self._committed = sum(map(tally_of, receipts.values()), Tally())
        self._is_created = False
        self._drain_until: float | None = None
        self._next_beat = self._next_progress = 0.0

    def run(self) -> None:
        """Until all shards are committed or a drain has ended."""
        try:
            with on_first_signal(self._drain):
                self._loop()
            if self._waiting or self._in_flight:
                self._say("interrupted")
        except (ConfigError, PermanentError) as error:
            self._say("failed", str(error))
            raise
        except BaseException as error:
            self._say("interrupted", str(error))
            raise
        finally:
            for worker in self._workers:
                ray.kill(worker.handle)

    @property
    def _in_flight(self) -> bool:
        return any(worker.flights for worker in self._workers)

    def _loop(self) -> None:
        for index in range(min(self._config.cluster.workers, len(self._waiting))):
            self._workers.append(Worker(index, self._start_worker(index)))
        while (self._waiting or self._in_flight) and not self._is_drained():
            self._start_and_assign()
            self._collect()
            self._beat()
        self._on_progress(self._progress())

    def _drain(self) -> None:
        self._drain_until = time.monotonic() + DRAIN_S

    def _is_drained(self) -> bool:
        return self._drain_until is not None and (not self._in_flight or time.monotonic() > self._drain_until)

    def _start_and_assign(self) -> None:
        for worker in self._workers:
            if not worker.is_ready and worker.starting is None and time.monotonic() >= worker.start_at:
                worker.starting = worker.handle.ready.remote()
        if self._drain_until is None:
            for worker in self._workers:
                while (shard_index := self._pick(worker)) is not None:
                    self._send(worker, shard_index)

    def _pick(self, worker: Worker) -> int | None:
        """The next shard for a worker, taken off the queue. The last shards go one to a worker."""
        has_own = any(self._troubles[flight.shard_index].needs_own_worker for flight in worker.flights.values())
        if not worker.is_ready or has_own or len(worker.flights) >= TASKS_IN_FLIGHT:
            return None
        if worker.flights and len(self._waiting) <= sum(not other.flights for other in self._workers):
            return None
        for index in self._waiting:
            is_due = self._not_before.get(index, 0.0) <= time.monotonic()
            if is_due and not (worker.flights and self._troubles[index].needs_own_worker):
                self._waiting.remove(index)
                return index
        return None

    def _send(self, worker: Worker, shard_index: int) -> None:
        shard = self._plan.shards[shard_index]
        troubles = replace(self._troubles[shard_index], attempts=self._troubles[shard_index].attempts + 1)
        self._troubles[shard_index] = troubles
        task = ShardTask(
            shard=shard,
            attempt=troubles.attempts,
            run_id=self._run_id,
            output=self._config.output.path,
            passthrough=self._plan.passthrough,
            dead_rows=troubles.dead_rows,
        )
        action = retries.next_action(shard, troubles, self._max_attempts)
        ref: ray.ObjectRef[Any]
        match action:
            case Generate():
                ref = worker.handle.generate.remote(task)
            case Probe(rows):
                ref = worker.handle.probe.remote(task, rows.start, len(rows))
            case GiveUp(error_type, message):
                ref = worker.handle.fail_rows.remote(task, error_type, message)
        worker.flights[ref] = Flight(shard_index, action)

    def _collect(self) -> None:
        """Take in the next answer, if one comes soon."""
        owners = {ref: worker for worker in self._workers for ref in worker.refs()}
        if not owners:
            time.sleep(_POLL_S)
            return
        for ref in ray.wait(list(owners), timeout=_POLL_S)[0]:
            worker = owners[ref]
            if ref == worker.starting:
                self._started(worker, ref)
            elif ref == worker.asked:
                worker.asked = None
                with contextlib.suppress(RayError):  # a death shows in the tasks too
                    worker.progress = ray.get(ref)
            else:
                self._landed(worker, ref)

    def _started(self, worker: Worker, ref: ray.ObjectRef[str]) -> None:
        """The first worker that is ready makes the job in storage; each must have loaded the same model."""
        worker.starting = None
        try:
            revision = _answer(ref)
        except (_WorkerDied, TransientError) as error:
            worker.failed_starts += 1
            if worker.failed_starts >= self._max_attempts:
                raise PermanentError(
                    f"worker {worker.index} could not start in {worker.failed_starts} attempts: {error}"
                ) from error
            worker.start_at = time.monotonic() + 2.0**worker.failed_starts
            if isinstance(error.__cause__, ActorDiedError):  # for good: Ray has no restarts left for it
                worker.handle = self._start_worker(worker.index)
            return
        retrying(lambda: self._store.create_or_resume(self._config, self._plan, revision))
        self._is_created = True
        worker.is_ready, worker.failed_starts = True, 0

    def _landed(self, worker: Worker, ref: ray.ObjectRef[Any]) -> None:
        flight = worker.flights.pop(ref)
        shard, troubles = self._plan.shards[flight.shard_index], self._troubles[flight.shard_index]
        try:
            receipt = _answer(ref)
        except TransientError as error:
            self._requeue(shard.index, retries.after_fault(troubles, str(error)))
        except _WorkerDied as error:
            worker.died()
            self._requeue(shard.index, retries.after_death(shard, troubles, flight.action, str(error)))
        else:
            if isinstance(flight.action, Probe):
                self._requeue(shard.index, retries.after_survival(troubles, flight.action))
            else:
                self._commit(worker, receipt)

    def _requeue(self, shard_index: int, troubles: Troubles) -> None:
        logger.warning("shard %d will be tried again: %s", shard_index, troubles.message)
        if retries.is_hopeless(troubles, self._max_attempts):
            raise PermanentError(f"shard {shard_index} cannot be written, not even as errors: {troubles.message}")
        self._troubles[shard_index] = troubles
        self._not_before[shard_index] = time.monotonic() + retries.pause_s(troubles)
        self._waiting.append(shard_index)

    def _commit(self, worker: Worker, receipt: PartReceipt) -> None:
        standing = retrying(lambda: self._store.commit(receipt))
        self._receipts[receipt.shard_index] = standing
        self._committed += tally_of(standing)
        worker.delivered += tally_of(receipt)

    def _beat(self) -> None:
        now = time.monotonic()
        if self._is_created and now >= self._next_beat:
            self._next_beat = now + HEARTBEAT_S
            self._say("running")
        if now >= self._next_progress:
            self._next_progress = now + PROGRESS_S
            for worker in self._workers:
                if worker.is_ready and worker.asked is None:
                    worker.asked = worker.handle.progress.remote()
            self._on_progress(self._progress())

    def _say(self, state: Literal["running", "interrupted", "failed"], message: str = "") -> None:
        """Tell storage how the driver is. It only informs, so a fault of the store is no reason to stop."""
        if self._is_created:
            try:
                self._store.set_state(state, self._run_id, message)
            except (TransientError, OSError) as error:
                logger.warning("the driver's state could not be written: %s", error)

    def _progress(self) -> Progress:
        done = sum((worker.undelivered() for worker in self._workers), self._committed)
        total = self._plan.num_rows * self._config.sampling.n
        return Progress(
            rows_done=min(done.rows, total),  # rows that are decoded again, or probed, count twice until then
            rows_failed=done.failed,
            rows_total=total,
            shards_committed=len(self._receipts),
            shards_total=len(self._plan.shards),
            completion_tokens=done.tokens,
            workers=tuple(worker.shown(is_draining=self._drain_until is not None) for worker in self._workers),
            elapsed_s=time.monotonic() - self._began,
        )


def _answer(ref: ray.ObjectRef[Any]) -> Any:
    """What a worker answers. Its own errors are raised plainly; the end of its process is a _WorkerDied."""
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
        raise _WorkerDied(f"{type(error).__name__}: {lines[-1] if lines else 'no reason given'}") from error
