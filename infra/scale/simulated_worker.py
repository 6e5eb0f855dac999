"""The actor of a job whose engine is simulated: it reads the real prompts and writes real parts, but imports no torch.

In place of tokens it counts words. Its `ready` waits until all workers of the job exist, as if they had loaded a model,
so that the time of starting processes on two cores is no part of what is measured.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import pyarrow as pa
import pyarrow.parquet as pq

from infra.scale.simulated_engine import SimulatedEngine, StepTime
from pipeline.config import JobConfig
from pipeline.logs import tracing
from pipeline.parts import write_part
from pipeline.prompts import Prompt, read_prompts
from pipeline.records import AcceptanceStats, PartReceipt, SampleRecord, Shard, ShardTask, WorkerProgress
from workers.tasks import Task, Tasks

REVISION = "simulated"
SHORTEST = 16


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a worker stood when it began or ended a shard."""

    at: float
    begins: bool
    busy_s: float
    work_s: float
    progress_calls: int


class SimulatedWorker:
    """What `pipeline.driver` expects of a worker."""

    def __init__(self, config: JobConfig, name: str, step_time: StepTime, scratch: str) -> None:
        self._config = config
        self._name = name
        self._scratch = Path(scratch)
        self._engine = SimulatedEngine(step_time, config.engine.max_sequences)
        self._counting = threading.Lock()
        self._tasks = Tasks()
        self._is_ready = False
        self._rows_done = self._progress_calls = 0

    def ready(self) -> str:
        self._warm_up()
        (self._scratch / f"{self._name}.ready").touch()
        while len(list(self._scratch.glob("*.ready"))) < self._config.cluster.min_workers:
            time.sleep(0.1)
        self._is_ready = True
        return REVISION

    def generate(self, task: ShardTask) -> PartReceipt:
        began = time.perf_counter()
        with tracing(task.trace), self._marked(), self._tasks.in_hand(task.part_name) as in_hand:
            try:
                records = self._decode(task, in_hand)
            except CancelledError:
                in_hand.check()
                raise
            return write_part(task, records, self._config, REVISION, self._name, time.perf_counter() - began)

    def withdraw(self, part_name: str) -> None:
        self._tasks.withdraw(part_name)

    def progress(self) -> WorkerProgress:
        with self._counting:
            self._progress_calls += 1
            return WorkerProgress(
                worker=self._name,
                state="loading" if not self._is_ready else "running" if self._tasks.are_in_hand else "idle",
                rows_done=self._rows_done,
                rows_failed=0,
                completion_tokens=self._engine.tokens,
                running=self._engine.running,
                waiting=self._engine.waiting,
                stats=_stats(self._engine.tokens),
            )

    def _warm_up(self) -> None:
        """The first use of Arrow and fsspec imports a lot, on which 32 processes would wait for two cores."""
        file = self._scratch / f"{self._name}.parquet"
        pq.write_table(pa.Table.from_pylist([{"prompt": "warm-up"}]), file, compression="zstd")
        list(read_prompts(Shard(0, str(file), 0, 1, (0,)), self._config.input, ()))

    def _decode(self, task: ShardTask, in_hand: Task) -> list[SampleRecord]:
        prompts = list(read_prompts(task.shard, self._config.input, self._config.output.columns))
        lengths = [output_length(prompt.uid, self._config.sampling.max_tokens) for prompt in prompts]
        counts = [len((prompt.prompt or "").split()) for prompt in prompts]
        pending = [self._engine.submit(count, length) for count, length in zip(counts, lengths, strict=True)]
        for done in pending:
            in_hand.awaits(done)
        began = time.perf_counter()
        records = []
        for prompt, count, length, done in zip(prompts, counts, lengths, pending, strict=True):
            done.result()
            records.append(_record(prompt, count, length, time.perf_counter() - began))
            self._rows_done += 1
        return records

    @contextmanager
    def _marked(self) -> Iterator[None]:
        """Notes where the engine stands at both ends of a shard, for the figures."""
        self._mark(begins=True)
        try:
            yield
        finally:
            self._mark(begins=False)

    def _mark(self, *, begins: bool) -> None:
        engine = self._engine
        mark = {
            "at": time.time(),
            "begins": begins,
            "busy_s": engine.busy_s,
            "work_s": engine.work_s,
            "progress_calls": self._progress_calls,
        }
        with self._counting, open(self._scratch / f"{self._name}.marks", "a") as file:
            file.write(json.dumps(mark) + "\n")


def read_marks(scratch: Path) -> list[list[Mark]]:
    """What each worker noted, in order of time."""
    files = sorted(scratch.glob("*.marks"))
    return [[Mark(**json.loads(line)) for line in file.read_text().splitlines()] for file in files]


def output_length(uid: str, longest: int) -> int:
    """New tokens of a row, the same in every run: evenly spread between SHORTEST and `longest`."""
    return SHORTEST + crc32(uid.encode()) % (longest - SHORTEST + 1)


def _stats(tokens: int) -> AcceptanceStats:
    return AcceptanceStats(num_steps=tokens, acceptance_histogram=(tokens,), window_histogram=(tokens,))


def _record(prompt: Prompt, prompt_tokens: int, completion_tokens: int, latency_s: float) -> SampleRecord:
    return SampleRecord(
        id=prompt.uid,
        sample_index=0,
        prompt=prompt.prompt,
        messages=prompt.messages,
        generation="word " * completion_tokens,
        finish_reason="length",
        error_type=None,
        error=None,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        stats=_stats(completion_tokens),
        latency_s=latency_s,
        passthrough=prompt.passthrough,
        completion_token_ids=tuple(range(completion_tokens)),
    )
