"""A request that an engine works on, and whoever waits for its samples."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass, field

from pipeline.errors import RowError
from pipeline.logs import tracing
from pipeline.redaction import redacted
from workers.engine import Request, SampleResult
from workers.memory_faults import is_out_of_memory

logger = logging.getLogger(__name__)

ResultFuture = Future[list[SampleResult]]


@dataclass(slots=True)
class InFlight:
    """A request, and the samples of it that have finished. Who has cancelled its future is told nothing more."""

    request: Request
    trace: str
    future: ResultFuture = field(default_factory=Future)
    results: list[SampleResult] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return len(self.results) == self.request.sampling.n

    def fail(self, error: Exception) -> None:
        """Answers with the error; what is none of the row's own becomes a RowError, and is logged."""
        if not isinstance(error, RowError):
            error_type = "out_of_memory" if is_out_of_memory(error) else "engine_error"
            error = RowError(error_type, redacted(f"{type(error).__name__}: {error}"))
            with tracing(self.trace):
                logger.info("the request %s failed: %s: %s", self.request.uid, error.error_type, error)
        self.refuse(error)

    def refuse(self, error: Exception) -> None:
        """Answers with the error as it is."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)
