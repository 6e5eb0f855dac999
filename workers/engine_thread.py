"""The one thread that steps the engine, and the queue through which other threads feed it.

An engine serves requests of many shards at once and may be called by one thread only. Callers hold a future per
request. The thread never dies silently. When a step raises, the engine is built anew and the requests in flight are
decoded again in halves of halves until the one that raises is alone; it fails, the others are delivered. When a step
runs out of memory, they are decoded again by an engine that takes on half as much; only when it can take on no less,
the request at work fails.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace

import torch

from pipeline.errors import PermanentError
from pipeline.logs import current_trace, tracing
from pipeline.records import AcceptanceStats, OccupancyClass
from workers.engine import Engine, Request, SampleResult
from workers.in_flight import InFlight, ResultFuture
from workers.memory_faults import is_out_of_memory, let_go

logger = logging.getLogger(__name__)

MakeEngine = Callable[[int], Engine]
"""Makes an engine whose limits are halved so many times."""
MOST_HALVINGS = 12
"""By then every engine is one of a single sequence: a model for which that is too much does not fit at all."""


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """How the engine is now, and the figures of all requests that were delivered.

    `stalled_s`: seconds since the last step ended while there is work; 0.0 without work, and while an engine is built.
    """

    running: int
    waiting: int
    stats: AcceptanceStats
    prompt_tokens: int = 0
    stalled_s: float = 0.0
    kv_usage: float = 0.0
    preemptions: int = 0
    memory_halvings: int = 0


class EngineThread:
    """Steps one engine in a thread of its own."""

    def __init__(self, make_engine: MakeEngine, *, owns_process: bool = True) -> None:
        """When the engine cannot go on at all, the process ends if it `owns_process`, else all its requests fail."""
        self._make_engine = make_engine
        self._owns_process = owns_process
        self._halvings = 0
        self._engine = self._build_engine()
        self._observed: Engine | None = self._engine  # for other threads; None while the engine is built anew
        self._inbox: queue.SimpleQueue[InFlight | None] = queue.SimpleQueue()
        self._in_flight: dict[str, InFlight] = {}
        self._cancelled: deque[InFlight] = deque()
        self._busy_since = 0.0
        self._earlier_preemptions = 0
        self._prompt_tokens = 0
        self._stats = AcceptanceStats()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> ResultFuture:
        """All samples of a request, in sample order. The future raises `RowError` when this request cannot be served.

        Cancelling the future drops the request, also in the midst of decoding.
        """
        entry = InFlight(request, current_trace())
        entry.future.add_done_callback(lambda future: self._cancelled.append(entry) if future.cancelled() else None)
        self._inbox.put(entry)
        return entry.future

    def close(self) -> None:
        """Ends the thread after the step in progress; requests in flight stay undone."""
        self._inbox.put(None)
        self._thread.join()

    @property
    def counters(self) -> EngineCounters:
        counted = EngineCounters(
            running=0,
            waiting=self._inbox.qsize(),
            stats=self._stats,
            prompt_tokens=self._prompt_tokens,
            preemptions=self._earlier_preemptions,
            memory_halvings=self._halvings,
        )
        engine = self._observed
        if engine is None:
            return counted
        return replace(
            counted,
            running=engine.num_running,
            waiting=engine.num_waiting + counted.waiting,
            stalled_s=time.perf_counter() - max(engine.stepped_at, self._busy_since) if engine.has_work else 0.0,
            kv_usage=engine.scheduler.cache.usage,
            preemptions=counted.preemptions + engine.scheduler.num_sent_back,
        )

    def take_occupancy(self) -> tuple[OccupancyClass, ...]:
        """What the steps since the last call were like; what an engine counted that was given up is lost."""
        engine = self._observed
        return () if engine is None else engine.occupancy.take()

    def take_step_seconds(self) -> list[float]:
        """The times of the steps since the last call, of the last ones if there were many."""
        engine, seconds = self._observed, []
        with suppress(IndexError):
            while engine is not None:
                seconds.append(engine.step_seconds.popleft())
        return seconds

    def _run(self) -> None:
        try:
            while self._take_in():
                self._step()
        except BaseException as error:
            # Nobody would ever answer the waiting futures. The driver sees the process end and tries again elsewhere.
            with self._tracing(self._in_flight.values()):
                ending = ", this worker ends" if self._owns_process else ""
                logger.critical("the engine cannot go on%s", ending, exc_info=True)
            if self._owns_process:
                os._exit(1)
            self._refuse_all(PermanentError(f"the engine cannot go on: {type(error).__name__}: {error}"))

    def _refuse_all(self, error: PermanentError) -> None:
        """Fails what is in flight and whatever comes, until the thread is closed."""
        entry: InFlight | None
        for entry in self._in_flight.values():
            if not entry.future.done():
                entry.refuse(error)
        while (entry := self._inbox.get()) is not None:
            entry.refuse(error)

    def _step(self) -> None:
        self._drop_cancelled()
        try:
            results = self._engine.step() if self._engine.has_work else []
        except Exception as error:
            if is_out_of_memory(error):
                self._go_on_with_less(error)
            else:
                self._isolate(error)
        else:
            self._deliver(results)

    def _take_in(self) -> bool:
        """Hands the inbox to the engine, waiting for it when there is nothing else to do. False: closed."""
        wait = not self._engine.has_work
        while wait or not self._inbox.empty():
            entry = self._inbox.get()
            if wait:
                self._busy_since = time.perf_counter()
            wait = False
            if entry is None:
                return False
            if entry.request.uid in self._in_flight:
                self._drop_cancelled()  # a shard is tried again: its first attempt was cancelled before
            assert entry.request.uid not in self._in_flight, entry.request.uid
            if not entry.future.cancelled():
                self._accept(entry)
        return True

    def _accept(self, entry: InFlight) -> None:
        try:
            self._engine.submit(entry.request)
        except Exception as error:
            entry.fail(error)
        else:
            self._in_flight[entry.request.uid] = entry

    def _drop_cancelled(self) -> None:
        while self._cancelled:
            entry = self._cancelled.popleft()
            if self._in_flight.get(entry.request.uid) is entry:
                self._engine.cancel(entry.request.uid)
                del self._in_flight[entry.request.uid]

    def _deliver(self, results: Sequence[SampleResult]) -> None:
        for result in results:
            entry = self._in_flight[result.uid]
            entry.results.append(result)
            if entry.is_complete:
                del self._in_flight[result.uid]
                self._resolve(entry, sorted(entry.results, key=lambda sample: sample.sample_index))

    def _go_on_with_less(self, error: Exception) -> None:
        """Decodes all requests in flight again, half as many at once. An engine of one sequence fails its request."""
        if not self._engine.is_smallest:
            self._halve(error, self._in_flight.values())
        else:
            foremost = self._engine.scheduler.foremost
            uid = next(iter(self._in_flight)) if foremost is None else foremost.request.uid
            self._in_flight.pop(uid).fail(error)
        entries = list(self._in_flight.values())
        self._renew_engine(error)
        self._in_flight.clear()
        for entry in entries:
            entry.results.clear()
            self._accept(entry)

    def _halve(self, error: Exception, entries: Iterable[InFlight] = ()) -> None:
        """The next engine takes on less. That is for good: what ran out once would again."""
        self._halvings += 1
        with self._tracing(entries):
            reason = str(error).partition("\n")[0] or type(error).__name__
            logger.warning("memory ran out, the engine goes on with 1/%d of its limits: %s", 2**self._halvings, reason)

    def _isolate(self, error: Exception) -> None:
        """Decodes all requests in flight again, apart from each other where they fail together."""
        entries = list(self._in_flight.values())
        with self._tracing(entries):
            logger.warning("the engine raised; finding the request that caused it", exc_info=error)
        self._renew_engine(error)
        groups = [entries]
        while groups:
            group = groups.pop()
            try:
                results = self._engine.generate([entry.request for entry in group])
            except Exception as failure:
                if is_out_of_memory(failure) and not self._engine.is_smallest:
                    self._halve(failure, group)
                    groups.append(group)
                elif len(group) == 1:
                    group[0].fail(failure)
                else:
                    groups += [group[len(group) // 2 :], group[: len(group) // 2]]
                self._renew_engine(failure)
            else:
                for entry in group:
                    self._resolve(entry, [result for result in results if result.uid == entry.request.uid])
        self._in_flight.clear()

    def _renew_engine(self, error: Exception) -> None:
        if isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error):
            raise error  # the CUDA context is lost for good: only a new process can go on
        self._observed = None
        self._earlier_preemptions += self._engine.scheduler.num_sent_back
        del self._engine
        let_go(error)
        self._engine = self._observed = self._build_engine()

    def _build_engine(self) -> Engine:
        """An engine within the limits that there is memory for: to be built it runs steps of the largest size."""
        while True:
            try:
                return self._make_engine(self._halvings)
            except Exception as error:
                if not is_out_of_memory(error) or self._halvings == MOST_HALVINGS:
                    raise
                self._halve(error)
                let_go(error)

    def _resolve(self, entry: InFlight, results: list[SampleResult]) -> None:
        """Delivers the samples unless the caller has cancelled."""
        if entry.future.set_running_or_notify_cancel():
            self._stats = sum((result.stats for result in results), self._stats)
            self._prompt_tokens += len(entry.request.prompt_ids)
            entry.future.set_result(results)

    @staticmethod
    def _tracing(entries: Iterable[InFlight]) -> AbstractContextManager[None]:
        """What is logged meanwhile carries the traces of all these requests: few, one for each shard in hand."""
        return tracing(",".join(sorted({entry.trace for entry in entries if entry.trace})))
