"""The one thread that steps the engine, and the queue through which other threads feed it.

An engine serves requests of many shards at once and may be called by one thread only. Callers hold a future per
request. The thread never dies silently: when a step raises, the engine is built anew and the requests in flight are
decoded again in halves of halves until the one that raises is alone; it fails, the others are delivered.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from pipeline.errors import RowError
from pipeline.records import AcceptanceStats
from workers.engine import Engine, Request, SampleResult

logger = logging.getLogger(__name__)

ResultFuture = Future[list[SampleResult]]


@dataclass(slots=True)
class _InFlight:
    """A request that the engine works on, and the samples of it that have finished."""

    request: Request
    future: ResultFuture
    results: list[SampleResult] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return len(self.results) == self.request.sampling.n


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Samples that run or wait now, and the figures of all requests that were delivered."""

    running: int
    waiting: int
    stats: AcceptanceStats


class EngineThread:
    """Steps one engine in a thread of its own."""

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self._make_engine = make_engine
        self._engine = make_engine()
        self._inbox: queue.SimpleQueue[_InFlight | None] = queue.SimpleQueue()
        self._in_flight: dict[str, _InFlight] = {}
        self._running_and_waiting = (0, 0)
        self._stats = AcceptanceStats()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> ResultFuture:
        """All samples of a request, in sample order. The future raises `RowError` when this request cannot be served.

        Cancelling the future drops the request, also in the midst of decoding.
        """
        entry = _InFlight(request, Future())
        self._inbox.put(entry)
        return entry.future

    def close(self) -> None:
        """Ends the thread after the step in progress; requests in flight stay undone."""
        self._inbox.put(None)
        self._thread.join()

    @property
    def counters(self) -> EngineCounters:
        running, waiting = self._running_and_waiting
        return EngineCounters(running, waiting + self._inbox.qsize(), self._stats)

    def _run(self) -> None:
        try:
            while self._take_in():
                self._step()
        except BaseException:
            # Nobody would ever answer the waiting futures. The driver sees the process end and tries again elsewhere.
            logger.critical("the engine cannot go on, this worker ends", exc_info=True)
            os._exit(1)

    def _step(self) -> None:
        self._drop_cancelled()
        try:
            results = self._engine.step() if self._engine.has_work else []
        except Exception as error:
            self._isolate(error)
        else:
            self._running_and_waiting = (self._engine.num_running, self._engine.num_waiting)
            self._deliver(results)

    def _take_in(self) -> bool:
        """Hands the inbox to the engine, waiting for it when there is nothing else to do. False: closed."""
        wait = not self._engine.has_work
        while wait or not self._inbox.empty():
            entry = self._inbox.get()
            wait = False
            if entry is None:
                return False
            if entry.request.uid in self._in_flight:
                self._drop_cancelled()  # a shard is tried again: its first attempt was cancelled before
            assert entry.request.uid not in self._in_flight, entry.request.uid
            try:
                self._engine.submit(entry.request)
            except Exception as error:
                _fail(entry.future, error)
            else:
                self._in_flight[entry.request.uid] = entry
        return True

    def _drop_cancelled(self) -> None:
        for uid in [uid for uid, entry in self._in_flight.items() if entry.future.cancelled()]:
            self._engine.cancel(uid)
            del self._in_flight[uid]

    def _deliver(self, results: Sequence[SampleResult]) -> None:
        for result in results:
            entry = self._in_flight[result.uid]
            entry.results.append(result)
            if entry.is_complete:
                del self._in_flight[result.uid]
                self._resolve(entry, sorted(entry.results, key=lambda sample: sample.sample_index))

    def _isolate(self, error: Exception) -> None:
        """Decodes all requests in flight again, apart from each other where they fail together."""
        logger.warning("the engine raised; finding the request that caused it", exc_info=error)
        entries = list(self._in_flight.values())
        self._in_flight.clear()
        self._renew_engine(error)
        groups = [entries]
        while groups:
            group = groups.pop()
            try:
                results = self._engine.generate([entry.request for entry in group])
            except Exception as failure:
                self._renew_engine(failure)
                if len(group) == 1:
                    _fail(group[0].future, failure)
                else:
                    groups += [group[len(group) // 2 :], group[: len(group) // 2]]
            else:
                for entry in group:
                    self._resolve(entry, [result for result in results if result.uid == entry.request.uid])

    def _renew_engine(self, error: Exception) -> None:
        if isinstance(error, torch.AcceleratorError):
            raise error  # the CUDA context is lost for good: only a new process can go on
        # Memory of the old engine, held by the frames of the error too, goes before the new one takes its own.
        traceback.clear_frames(error.__traceback__)
        del self._engine
        self._engine = self._make_engine()

    def _resolve(self, entry: _InFlight, results: list[SampleResult]) -> None:
        """Delivers the samples unless the caller has cancelled."""
        if entry.future.set_running_or_notify_cancel():
            self._stats = sum((result.stats for result in results), self._stats)
            entry.future.set_result(results)


def _fail(future: ResultFuture, error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        is_known = isinstance(error, RowError)
        future.set_exception(error if is_known else RowError("engine_error", f"{type(error).__name__}: {error}"))
