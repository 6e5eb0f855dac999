"""Log output of a process that is ours: a command, or a worker. A library user's own logging is never touched.

Text shows warnings only, as plain sentences. JSON is one object per line with `time`, `level`, `logger`, `trace` and
`message`, and tells of every step of a shard too. In both, credentials are taken out of messages and tracebacks.

A trace is the name of one attempt at a shard (`ShardTask.trace`), set where work on it begins; what is logged in that
context carries it, in the driver and in the worker alike.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal, TextIO

from pipeline.redaction import redacted

LogFormat = Literal["text", "json"]

OWN_LOGGERS = ("pipeline", "workers", "jobs")
_HANDLER_NAME = "sevenleague"
_trace: ContextVar[str] = ContextVar("trace", default="")


def current_trace() -> str:
    """The trace of this context; empty where there is none."""
    return _trace.get()


@contextmanager
def tracing(trace: str) -> Iterator[None]:
    """What is logged meanwhile, in this thread, carries the trace."""
    token = _trace.set(trace)
    try:
        yield
    finally:
        _trace.reset(token)


def configure(log_format: LogFormat) -> None:
    """Log to stderr in this format, uncaught errors too. For processes that are ours; a later call replaces it."""
    handler = _StderrHandler()
    handler.set_name(_HANDLER_NAME)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    for earlier in [h for h in root.handlers if h.get_name() == _HANDLER_NAME]:
        root.removeHandler(earlier)
    root.addHandler(handler)
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO if log_format == "json" else logging.WARNING)
    sys.excepthook = _log_uncaught


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is by then: a progress display puts itself in its place."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class TextFormatter(logging.Formatter):
    """The message, and the trace before it if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        text = redacted(super().format(record))
        trace = current_trace()
        return f"[{trace}] {text}" if trace else text


class JsonFormatter(logging.Formatter):
    """One JSON object; `exception` is there when a traceback was logged."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC)
        fields = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "trace": current_trace() or None,
            "message": redacted(record.getMessage()),
        }
        if record.exc_info:
            fields["exception"] = redacted(self.formatException(record.exc_info))
        return json.dumps(fields, ensure_ascii=False)


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    logging.getLogger("jobs").critical("unexpected error", exc_info=(kind, error, traceback))
