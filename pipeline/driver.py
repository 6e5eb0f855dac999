"""The loop: tasks out, receipts in, commits. Rows never pass through here, only metadata.

A worker has at most two tasks in flight, so that its slots never run dry between shards; a shard that has ended a
worker before gets one for itself. `attempts` says which shard is next and what follows when one comes back undone,
`crew` looks after the workers, `tenure` sees to it that one driver at a time is on an output.

The driver starts workers through `start_worker` and expects of them: `ready() -> str` (the model's revision; waits for
the model), `generate(task) -> PartReceipt`, `probe(task, start_row, num_rows) -> None` (dead rows left out),
`fail_rows(task, error_type, message) -> PartReceipt`, `withdraw(part_name) -> None` (drop a task), and
`progress() -> WorkerProgress`, which never waits.

SIGTERM and Ctrl-C drain: no new tasks, those in flight have `cluster.grace_s` seconds to finish and be committed; a
second one stops at once. Whatever happens, what is committed stays, and the next run of the same job goes on from it.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pipeline.attempts import Attempts
from pipeline.commits import JobStore
from pipeline.crew import Crew, StartWorker
from pipeline.elasticity import check_resources
from pipeline.errors import ConfigError, PermanentError, TransientError, Withdrawn
from pipeline.fleet import Flight, Tally, Worker, tally_of
from pipeline.job_metrics import JobMetrics
from pipeline.logs import tracing
from pipeline.metrics import DRIVER_METRICS
from pipeline.preparation import Prepared
from pipeline.quality import QualityWatch
from pipeline.ray_link import Nodes, WorkerDied, answer, ready_among
from pipeline.ray_metrics import RayMetrics
from pipeline.records import PartReceipt, Progress, ProgressCallback
from pipeline.redaction import without_credentials
from pipeline.retries import Generate, GiveUp, Probe
from pipeline.signals import on_first_signal
from pipeline.summary import JobSummary, summarise
from pipeline.tenure import Tenure

TASKS_IN_FLIGHT = 2
COMMITS_AT_ONCE = 8
"""A store may take long for each; the loop does not wait for it."""
PROGRESS_S = 1.0
_POLL_S = 0.25

logger = logging.getLogger(__name__)


def run(prepared: Prepared, start_worker: StartWorker, on_progress: ProgressCallback) -> JobSummary:
    """Generate what remains of a job and finish it, in the Ray session that the caller has opened.

    The summary's state is `done`, or `interrupted` after a drain. Raises ConfigError and PermanentError where the job
    cannot go on, TransientError where store or cluster stay away; each leaves the job resumable. With nothing remaining
    Ray is not touched.
    """
    store = JobStore(prepared.config.output.path)
    receipts = prepared.settled
    run_id = uuid.uuid4().hex[:8]
    tenure = Tenure(store, run_id)
    try:
        if prepared.remaining:
            tenure.wait_for_it()
            with Nodes() as nodes:
                check_resources(prepared.config.cluster, nodes.resources)
                _Run(prepared, run_id, store, receipts, tenure, nodes, start_worker, on_progress).run()
        is_done = len(receipts) == len(prepared.plan.shards)
        standing = {**prepared.receipts, **receipts}
        summary = summarise(standing.values(), prepared.plan, prepared.config, "done" if is_done else "interrupted")
        if is_done:
            store.finish(prepared.config, receipts.values(), summary.metrics())
    except (ConfigError, PermanentError) as error:
        tenure.end("failed", str(error))
        raise
    except BaseException as error:
        tenure.end("interrupted", str(error))
        raise
    tenure.end("done" if is_done else "interrupted")
    return summary


class _Run:
    """One run of the loop. `receipts` is the caller's and fills up as shards are committed."""

    def __init__(
        self,
        prepared: Prepared,
        run_id: str,
        store: JobStore,
        receipts: dict[int, PartReceipt],
        tenure: Tenure,
        nodes: Nodes,
        start_worker: StartWorker,
        on_progress: ProgressCallback,
    ) -> None:
        cluster = prepared.config.cluster
        self._prepared = prepared
        self._cluster = cluster
        self._store = store
        self._receipts = receipts
        self._tenure = tenure
        self._nodes = nodes
        self._on_progress = on_progress
        self._began = time.monotonic()
        self._attempts = Attempts(prepared, run_id)
        self._crew = Crew(cluster, nodes, start_worker, min(cluster.max_workers, self._attempts.open_shards))
        self._committers = ThreadPoolExecutor(COMMITS_AT_ONCE, "commit")
        self._committing: dict[Future[PartReceipt], tuple[Worker, PartReceipt]] = {}
        self._committed = sum(map(tally_of, receipts.values()), Tally())
        labels = {"output": without_credentials(prepared.config.output.path)}
        self._metrics = JobMetrics(RayMetrics(DRIVER_METRICS, labels))
        self._quality = QualityWatch(expects_ends=not prepared.config.sampling.ignore_eos)
        for receipt in receipts.values():
            self._quality.observe(receipt)  # what these give rise to was said in an earlier run
        self._revision: str | None = None
        self._drain_until: float | None = None
        self._next_progress = 0.0

    def run(self) -> None:
        """Until all shards are committed or a drain has ended."""
        try:
            with on_first_signal(self._drain):
                self._loop()
        finally:
            self._crew.close()
            self._committers.shutdown(cancel_futures=True)

    def _loop(self) -> None:
        while (self._attempts.open_shards or self._committing) and not self._is_drained():
            now = time.monotonic()
            self._nodes.check()
            self._crew.tend(now)
            self._assign(now)
            self._collect()
            self._take_in_commits()
            self._tenure.beat()
            if now >= self._next_progress:
                self._next_progress = now + PROGRESS_S
                self._report()
        self._report()
        if self._attempts.redone:
            logger.warning("%d attempts at shards were lost and made again", self._attempts.redone)

    def _drain(self) -> None:
        self._drain_until = time.monotonic() + self._cluster.grace_s
        self._crew.is_closing = True

    def _is_drained(self) -> bool:
        if self._drain_until is None:
            return False
        return not (self._attempts.are_out or self._committing) or time.monotonic() > self._drain_until

    def _assign(self, now: float) -> None:
        """Tasks for whoever has room: a first one for all before a second one. The last shards go one to a worker."""
        if self._drain_until is not None:
            return
        takers = [worker for worker in self._crew.workers if worker.takes_tasks]
        idle = sum(worker.is_placed and not worker.flights for worker in self._crew.workers)  # also those that load
        for depth in range(TASKS_IN_FLIGHT):
            for worker in takers:
                if len(worker.flights) != depth or (depth and self._attempts.waiting <= idle):
                    continue
                if depth and self._attempts.needs_own_worker(worker.flights.values()):
                    continue
                flight = self._attempts.take(now, is_busy=depth > 0)
                if flight is None and not depth and self._cluster.duplicate_stragglers:
                    flight = self._attempts.take_straggler(now)
                if flight is not None:
                    self._send(worker, flight)
                    idle -= not depth

    def _send(self, worker: Worker, flight: Flight) -> None:
        task = flight.task
        match flight.action:
            case Generate():
                ref = worker.handle.generate.remote(task)
            case Probe(rows):
                ref = worker.handle.probe.remote(task, rows.start, len(rows))
            case GiveUp(error_type, message):
                ref = worker.handle.fail_rows.remote(task, error_type, message)
        worker.flights[ref] = flight
        with tracing(task.trace):
            logger.info("shard %d goes to worker-%d (%s)", flight.shard_index, worker.index, flight.action)

    def _collect(self) -> None:
        """Take in the answers that are there, if one comes soon."""
        owners = self._crew.owners()
        if not owners:
            time.sleep(_POLL_S)
            return
        for ref in ready_among(list(owners), _POLL_S):
            worker, now = owners[ref], time.monotonic()
            if ref in worker.flights:
                self._landed(worker, worker.flights.pop(ref), ref, now)
            elif ref == worker.starting:
                self._started(worker, now)
            else:
                self._crew.took_in(worker, ref, now)

    def _started(self, worker: Worker, now: float) -> None:
        """The first worker that is ready makes the job in storage; each must have loaded the same model."""
        revision = self._crew.started(worker, now)
        if revision is None:
            return
        if self._revision is None:
            job = self._prepared
            self._store.create_or_resume(job.config, job.plan, revision, job.retry)
            self._tenure.begin()
            self._revision = revision
        elif revision != self._revision:
            self._store.check_identity(self._prepared.config, self._prepared.plan.files, revision)

    def _landed(self, worker: Worker, flight: Flight, ref: Any, now: float) -> None:
        self._attempts.came_back(flight)
        try:
            receipt = answer(ref)
        except Withdrawn as error:
            worker.has_given_back |= self._attempts.is_open(flight)  # else the driver itself has withdrawn it
            self._attempts.lost(flight, str(error), now)
        except TransientError as error:
            self._attempts.faulted(flight, str(error), now)
        except WorkerDied as error:
            is_blameless = self._crew.is_blameless(worker, error)
            back = self._attempts.lost if is_blameless else self._attempts.died
            back(flight, worker.ended_by or str(error), now)
            self._crew.died(worker, error, now)
        else:
            if isinstance(flight.action, Probe):
                self._attempts.survived(flight, flight.action, now)
            else:
                self._withdraw(self._attempts.delivered(flight, now))
                self._committing[self._committers.submit(self._commit, flight, receipt)] = (worker, receipt)

    def _commit(self, flight: Flight, receipt: PartReceipt) -> PartReceipt:
        with tracing(flight.task.trace):
            standing = self._store.commit(receipt)
            is_first = standing.path == receipt.path
            logger.info("shard %d is committed%s", receipt.shard_index, "" if is_first else " by an earlier attempt")
        return standing

    def _take_in_commits(self) -> None:
        for future in [future for future in self._committing if future.done()]:
            worker, receipt = self._committing.pop(future)
            standing = future.result()
            worker.delivered += tally_of(receipt)
            if receipt.shard_index in self._receipts:
                continue  # the second of two attempts
            self._receipts[receipt.shard_index] = standing
            self._committed += tally_of(standing)
            self._metrics.committed(standing)
            for sentence in self._quality.observe(standing):
                logger.warning("quality: %s", sentence)

    def _withdraw(self, flights: Sequence[Flight]) -> None:
        """Others need not go on with what is done. Their answers say no more than that they have stopped."""
        for worker in self._crew.workers if flights else ():
            for flight in flights:
                if flight in worker.flights.values():
                    worker.handle.withdraw.remote(flight.task.part_name)

    def _report(self) -> None:
        progress = self._progress()
        self._on_progress(progress)
        self._metrics.publish(progress, self._attempts.waiting, self._crew.num_replaced, self._attempts.redone)

    def _progress(self) -> Progress:
        workers = self._crew.workers
        done = sum((worker.undelivered() for worker in workers), self._committed)
        total = self._prepared.plan.num_rows * self._prepared.config.sampling.n
        is_draining = self._drain_until is not None
        shown = [worker for worker in workers if worker.is_placed or worker.index < self._cluster.min_workers]
        return Progress(
            rows_done=min(done.rows, total),  # rows that are decoded again, or probed, count twice until then
            rows_failed=done.failed,
            rows_total=total,
            shards_committed=len(self._receipts),
            shards_total=len(self._prepared.plan.shards),
            completion_tokens=done.tokens,
            workers=tuple(worker.shown(is_draining=is_draining) for worker in shown),
            elapsed_s=time.monotonic() - self._began,
        )
