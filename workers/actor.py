"""The Ray actor: shard in, receipt out. It holds no policy; the driver decides about retries."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch

from pipeline import logs
from pipeline.config import JobConfig
from pipeline.errors import RowError, TransientError
from pipeline.logs import tracing
from pipeline.metrics import WORKER_METRICS
from pipeline.parts import write_part
from pipeline.prompts import Prompt
from pipeline.records import AcceptanceStats, PartReceipt, SampleRecord, ShardTask, WorkerProgress
from pipeline.redaction import without_credentials
from pipeline.redo import prompts_of
from workers.engine import Engine, Request
from workers.engine_thread import EngineThread
from workers.in_flight import ResultFuture
from workers.memory_faults import is_out_of_memory
from workers.model_loading import LoadedModel, load_model
from workers.rendering import TOKENIZED_TOGETHER, Renderer, make_renderer
from workers.replica_group import StartFollowers
from workers.sample_records import error_record, sample_record
from workers.tasks import Task, Tasks
from workers.tensor_parallel import load_replica
from workers.worker_metrics import WorkerMetrics

logger = logging.getLogger(__name__)

MAX_CONCURRENCY = 8
"""Calls that an actor serves at once: two shards, progress, readiness, a withdrawal, and room for others."""
FAREWELL_S = 5.0
"""What a worker that has drained waits to be asked how it is, so that the driver knows that it goes."""
ANSWERS_S = 0.5
"""What the last answers take on their way out."""


@dataclass(frozen=True, slots=True)
class _Runtime:
    """What a worker has once its model is loaded."""

    loaded: LoadedModel
    renderer: Renderer
    engine: EngineThread


@dataclass(frozen=True, slots=True)
class _Pending:
    """A row that was handed to the engine, or refused before it got there (then `samples` raises `RowError`)."""

    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    samples: ResultFuture


class GenerationWorker:
    """One model replica. Its methods run in several threads at once; one more thread steps the engine.

    The model is loaded by the first call that needs it: Ray tells why a method raised, but not why a constructor did.
    With `own_process` it sets up the log and the metrics of its process, and a SIGTERM, as before a spot machine is
    taken away, drains it: it takes no more tasks, has `cluster.grace_s` seconds for those in hand, gives the rest back,
    and ends its process.
    """

    def __init__(
        self, config: JobConfig, name: str, own_process: bool = False, start_followers: StartFollowers | None = None
    ) -> None:
        """`start_followers` starts the other processes of a tensor-parallel replica, of which this one is the first."""
        self._config = config
        self._start_followers = start_followers
        self._name = name
        self._began = time.time()
        self._runtime: _Runtime | None = None
        self._loading = threading.Lock()
        self._counting = threading.Lock()
        self._tasks = Tasks()
        self._said_farewell = threading.Event()
        self._rows_done = 0
        self._rows_failed = 0
        self._metrics: WorkerMetrics | None = None
        if own_process:
            logs.configure(config.cluster.log_format)
            self._metrics = _ray_metrics(config, name)
            # In the place of Ray's handler, which ends the process at once.
            signal.signal(signal.SIGTERM, lambda number, frame: self._drain_in_background())

    def ready(self) -> str:
        """Loads the model and returns its revision. Raises `ConfigError` when it cannot be served."""
        return self._load().loaded.revision

    def generate(self, task: ShardTask) -> PartReceipt:
        """Decodes the rows of a shard that the task is about and writes its part. Bad rows and `task.dead_rows` become
        error rows."""
        began = time.perf_counter()
        with tracing(task.trace), self._tasks.in_hand(task.part_name) as in_hand:
            logger.info("%s begins %d rows of %s", self._name, task.shard.num_rows, task.shard.path)
            dead = RowError("worker_crash", "decoding this row ended the worker's process")
            prompts = (
                (prompt, dead if prompt.row in task.dead_rows else None) for prompt in prompts_of(task, self._config)
            )
            return self._write(task, self._decode(in_hand, prompts), began)

    def probe(self, task: ShardTask, start_row: int, num_rows: int) -> None:
        """Decodes rows [start_row, start_row + num_rows) of the file, dead ones left out, and writes nothing."""
        with tracing(task.trace), self._tasks.in_hand(task.part_name) as in_hand:
            logger.info("%s looks for the row that kills, in %d rows from %d", self._name, num_rows, start_row)
            prompts = prompts_of(task, self._config)
            rows = set(range(start_row, start_row + num_rows)) - set(task.dead_rows)
            self._decode(in_hand, ((prompt, None) for prompt in prompts if prompt.row in rows))

    def fail_rows(self, task: ShardTask, error_type: str, message: str) -> PartReceipt:
        """Writes the part of a shard that was given up: every row is this error."""
        began = time.perf_counter()
        with tracing(task.trace), self._tasks.in_hand(task.part_name) as in_hand:
            prompts = prompts_of(task, self._config)
            records = self._decode(in_hand, ((prompt, RowError(error_type, message)) for prompt in prompts))
            return self._write(task, records, began)

    def withdraw(self, part_name: str) -> None:
        """Drops the task that makes this part; its call raises `Withdrawn`."""
        self._tasks.withdraw(part_name)

    def progress(self) -> WorkerProgress:
        """Counters since this process started. Never waits for the model."""
        runtime = self._runtime
        counters = runtime.engine.counters if runtime else None
        if self._tasks.is_draining:
            self._said_farewell.set()
        self._publish()
        with self._counting:
            return WorkerProgress(
                worker=self._name,
                state=self._state(),
                rows_done=self._rows_done,
                rows_failed=self._rows_failed,
                completion_tokens=counters.stats.completion_tokens if counters else 0,
                running=counters.running if counters else 0,
                waiting=counters.waiting if counters else 0,
                stats=counters.stats if counters else AcceptanceStats(),
                stalled_s=counters.stalled_s if counters else 0.0,
            )

    def _state(self) -> Literal["loading", "running", "idle", "draining"]:
        if self._tasks.is_draining:
            return "draining"
        if self._runtime is None:
            return "loading"
        return "running" if self._tasks.are_in_hand else "idle"

    def _drain_in_background(self) -> None:
        threading.Thread(target=self._drain, name="drain", daemon=True).start()

    def _drain(self) -> None:
        logger.warning("%s was told to end: it drains", self._name)
        self._tasks.drain(self._config.cluster.grace_s)
        self._said_farewell.wait(FAREWELL_S)
        time.sleep(ANSWERS_S)
        os._exit(0)

    def _load(self) -> _Runtime:
        with self._loading:
            if self._runtime is None:
                config = self._config
                torch.set_num_threads(worker_threads(config))
                with _fits_into_memory():
                    loaded = self._load_model()
                    engine = EngineThread(lambda halvings: _new_engine(loaded, config, halvings))
                self._runtime = _Runtime(loaded, make_renderer(loaded, config), engine)
            return self._runtime

    def _load_model(self) -> LoadedModel:
        if self._start_followers is None:
            return load_model(self._config.model)
        return load_replica(self._config.model, self._config.cluster.tensor_parallel, self._start_followers)

    def _decode(self, task: Task, prompts: Iterable[tuple[Prompt, RowError | None]]) -> list[SampleRecord]:
        """The records of all prompts, in order; a prompt that comes with an error is not decoded."""
        runtime = self._load()
        pending: list[_Pending] = []
        prompts = iter(prompts)
        while chunk := list(itertools.islice(prompts, TOKENIZED_TOGETHER)):
            task.check()
            for row in self._submit(runtime, chunk):
                task.awaits(row.samples)
                pending.append(row)
        logger.info("%d rows are read and with the engine", len(pending))
        try:
            records = [record for row in pending for record in self._records(row)]
            logger.info("%d samples are decoded", len(records))
            return records
        except CancelledError:
            task.check()
            raise

    def _submit(self, runtime: _Runtime, rows: list[tuple[Prompt, RowError | None]]) -> list[_Pending]:
        sampling = self._config.sampling
        good = [prompt for prompt, error in rows if error is None]
        rendered = iter(runtime.renderer.batch_token_ids(good, sampling.max_tokens))
        pending = []
        for prompt, error in rows:
            outcome = next(rendered) if error is None else error
            if isinstance(outcome, RowError):
                refused: ResultFuture = Future()
                refused.set_exception(outcome)
                pending.append(_Pending(prompt, (), refused))
            else:
                samples = runtime.engine.submit(Request(prompt.uid, outcome, prompt.sampled_by(sampling)))
                pending.append(_Pending(prompt, tuple(outcome), samples))
        return pending

    def _records(self, row: _Pending) -> list[SampleRecord]:
        n = self._config.sampling.n
        try:
            records = [sample_record(row.prompt, row.prompt_token_ids, result) for result in row.samples.result()]
            num_failed = 0
        except RowError as error:
            records = [error_record(row.prompt, sample_index, error) for sample_index in range(n)]
            num_failed = n
        with self._counting:
            self._rows_done += n
            self._rows_failed += num_failed
        return records

    def _write(self, task: ShardTask, records: list[SampleRecord], began: float) -> PartReceipt:
        runtime = self._load()
        loaded, engine = runtime.loaded, runtime.engine
        metadata = {"vocab_size": str(loaded.model.config.get_text_config().vocab_size)}
        seconds = time.perf_counter() - began
        attempt_began = time.time() - seconds
        written = write_part(task, records, self._config, loaded.revision, self._name, seconds, metadata)
        receipt = replace(written, began=attempt_began, worker_began=self._began, occupancy=engine.take_occupancy())
        logger.info("the part is written: %d rows in %d bytes", receipt.num_rows, receipt.num_bytes)
        self._publish()
        return receipt

    def _publish(self) -> None:
        runtime = self._runtime
        if self._metrics is not None and runtime is not None:
            self._metrics.publish(runtime.engine)


def worker_threads(config: JobConfig) -> int:
    """CPU threads of one worker's engine."""
    return config.engine.threads or max(1, int(config.cluster.cpus_per_worker))


@contextmanager
def _fits_into_memory() -> Iterator[None]:
    """A device that has no room for the model may have it when others have left it."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        raise TransientError(f"the model does not fit into the memory of its device: {reason}") from error


def _ray_metrics(config: JobConfig, name: str) -> WorkerMetrics:
    from pipeline.ray_metrics import RayMetrics  # the rest of a worker does without Ray

    labels = {"output": without_credentials(config.output.path), "worker": name}
    return WorkerMetrics(RayMetrics(WORKER_METRICS, labels))


def _new_engine(loaded: LoadedModel, config: JobConfig, halvings: int) -> Engine:
    """All that exists by then stays: looked through for garbage time and again, it would stop the engine for 250 ms."""
    engine = Engine(loaded, config.engine, config.decoding, config.output.recorded, halvings)
    gc.collect()
    gc.freeze()
    return engine
