"""The Ray actor: shard in, receipt out. It holds no policy; the driver decides about retries."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pipeline.config import JobConfig
from pipeline.errors import RowError
from pipeline.parts import write_part
from pipeline.prompts import Prompt, read_prompts
from pipeline.records import AcceptanceStats, PartReceipt, SampleRecord, ShardTask, WorkerProgress
from workers.engine import Engine, Request, SampleResult
from workers.engine_thread import EngineThread, ResultFuture
from workers.model_loading import LoadedModel, load_model
from workers.rendering import Renderer, make_renderer

MAX_CONCURRENCY = 6
"""Calls that an actor serves at once: two shards, progress, readiness, and room for a probe."""
_TOKENIZED_TOGETHER = 64
"""Rows that are rendered and tokenized before they are handed to the engine: few, so that it can start."""


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
    num_prompt_tokens: int
    samples: ResultFuture


class GenerationWorker:
    """One model replica. Its methods run in several threads at once; one more thread steps the engine.

    The model is loaded by the first call that needs it: Ray tells why a method raised, but not why a constructor did.
    """

    def __init__(self, config: JobConfig, name: str) -> None:
        self._config = config
        self._name = name
        self._runtime: _Runtime | None = None
        self._loading = threading.Lock()
        self._counting = threading.Lock()
        self._busy = 0
        self._rows_done = 0
        self._rows_failed = 0

    def ready(self) -> str:
        """Loads the model and returns its revision. Raises `ConfigError` when it cannot be served."""
        return self._load().loaded.revision

    def generate(self, task: ShardTask) -> PartReceipt:
        """Decodes the rows of a shard and writes its part. Bad rows and `task.dead_rows` become error rows."""
        began = time.perf_counter()
        with self._working():
            dead = RowError("worker_crash", "decoding this row ended the worker's process")
            prompts = (
                (prompt, dead if prompt.row in task.dead_rows else None)
                for prompt in read_prompts(task.shard, self._config.input, self._config.output.columns)
            )
            return self._write(task, self._decode(prompts), began)

    def probe(self, task: ShardTask, start_row: int, num_rows: int) -> None:
        """Decodes rows [start_row, start_row + num_rows) of the file, dead ones left out, and writes nothing."""
        with self._working():
            prompts = read_prompts(task.shard, self._config.input, self._config.output.columns)
            rows = set(range(start_row, start_row + num_rows)) - set(task.dead_rows)
            self._decode((prompt, None) for prompt in prompts if prompt.row in rows)

    def fail_rows(self, task: ShardTask, error_type: str, message: str) -> PartReceipt:
        """Writes the part of a shard that was given up: every row is this error."""
        began = time.perf_counter()
        with self._working():
            prompts = read_prompts(task.shard, self._config.input, self._config.output.columns)
            records = self._decode((prompt, RowError(error_type, message)) for prompt in prompts)
            return self._write(task, records, began)

    def progress(self) -> WorkerProgress:
        """Counters since this process started. Never waits for the model."""
        runtime = self._runtime
        counters = runtime.engine.counters if runtime else None
        with self._counting:
            return WorkerProgress(
                worker=self._name,
                state="loading" if counters is None else "running" if self._busy else "idle",
                rows_done=self._rows_done,
                rows_failed=self._rows_failed,
                completion_tokens=counters.stats.completion_tokens if counters else 0,
                running=counters.running if counters else 0,
                waiting=counters.waiting if counters else 0,
                stats=counters.stats if counters else AcceptanceStats(),
            )

    def _load(self) -> _Runtime:
        with self._loading:
            if self._runtime is None:
                config = self._config
                torch.set_num_threads(worker_threads(config))
                loaded = load_model(config.model)
                self._runtime = _Runtime(
                    loaded, make_renderer(loaded, config), EngineThread(lambda: _new_engine(loaded, config))
                )
            return self._runtime

    @contextmanager
    def _working(self) -> Iterator[None]:
        with self._counting:
            self._busy += 1
        try:
            yield
        finally:
            with self._counting:
                self._busy -= 1

    def _decode(self, prompts: Iterable[tuple[Prompt, RowError | None]]) -> list[SampleRecord]:
        """The records of all prompts, in order; a prompt that comes with an error is not decoded."""
        runtime = self._load()
        pending: list[_Pending] = []
        try:
            prompts = iter(prompts)
            while chunk := list(itertools.islice(prompts, _TOKENIZED_TOGETHER)):
                pending += self._submit(runtime, chunk)
            return [record for row in pending for record in self._records(row)]
        except BaseException:
            for row in pending:
                row.samples.cancel()
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
                pending.append(_Pending(prompt, 0, refused))
            else:
                samples = runtime.engine.submit(Request(prompt.uid, outcome, sampling))
                pending.append(_Pending(prompt, len(outcome), samples))
        return pending

    def _records(self, row: _Pending) -> list[SampleRecord]:
        n = self._config.sampling.n
        try:
            records = [sample_record(row.prompt, row.num_prompt_tokens, result) for result in row.samples.result()]
            num_failed = 0
        except RowError as error:
            records = [error_record(row.prompt, sample_index, error) for sample_index in range(n)]
            num_failed = n
        with self._counting:
            self._rows_done += n
            self._rows_failed += num_failed
        return records

    def _write(self, task: ShardTask, records: list[SampleRecord], began: float) -> PartReceipt:
        loaded = self._load().loaded
        metadata = {"vocab_size": str(loaded.model.config.get_text_config().vocab_size)}
        seconds = time.perf_counter() - began
        return write_part(task, records, self._config, loaded.revision, self._name, seconds, metadata)


def worker_threads(config: JobConfig) -> int:
    """CPU threads of one worker's engine."""
    return config.engine.threads or max(1, int(config.cluster.cpus_per_worker))


def _new_engine(loaded: LoadedModel, config: JobConfig) -> Engine:
    """All that exists by then stays: looked through for garbage time and again, it would stop the engine for 250 ms."""
    engine = Engine(loaded, config.engine, config.decoding, frozenset(config.output.extras))
    gc.collect()
    gc.freeze()
    return engine


def sample_record(prompt: Prompt, num_prompt_tokens: int, result: SampleResult) -> SampleRecord:
    """The output row of a finished sample."""
    return SampleRecord(
        id=prompt.uid,
        sample_index=result.sample_index,
        prompt=prompt.prompt,
        messages=prompt.messages,
        generation=result.text,
        finish_reason=result.finish_reason,
        error_type=None,
        error=None,
        prompt_tokens=num_prompt_tokens,
        completion_tokens=len(result.token_ids),
        stats=result.stats,
        latency_s=result.latency_s,
        passthrough=prompt.passthrough,
        completion_token_ids=result.token_ids,
        token_logprobs=result.token_logprobs,
        topk_token_ids=result.topk_token_ids,
        topk_logprobs=result.topk_logprobs,
        cdf_low=result.cdf_low,
        cdf_high=result.cdf_high,
    )


def error_record(prompt: Prompt, sample_index: int, error: RowError) -> SampleRecord:
    """The output row of a sample that failed: the prompt as far as it could be read, and zero counts."""
    return SampleRecord(
        id=prompt.uid,
        sample_index=sample_index,
        prompt=prompt.prompt,
        messages=prompt.messages,
        generation=None,
        finish_reason="error",
        error_type=error.error_type,
        error=str(error),
        prompt_tokens=0,
        completion_tokens=0,
        stats=AcceptanceStats(),
        latency_s=0.0,
        passthrough=prompt.passthrough,
    )
