"""What the faults of stores mean, and how long they are borne: one vocabulary and one policy for all of them.

An object that is missing, or in the way, raises the OSError that says so. A lack of rights or credentials, and what
the store refuses for what it is, raise PermanentError. All else (lost connection, time-out, throttling, 5xx, full disk)
may pass: the operation is repeated after a pause until `patience` has run out, and raises TransientError then.

The pauses are drawn at random between nothing and a limit that doubles each time, so that many workers that were
turned away together do not come back together. A put may be repeated although it had been carried out and only its
answer was lost, so whoever creates an object must know its own again (see `commits`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

from pipeline.errors import PermanentError, TransientError

T = TypeVar("T")

PATIENCE_S = 60.0
"""How long an operation is repeated, by default."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
_SAID_FROM_S = 4.0
"""Pauses of this length and more are logged; shorter ones are daily business."""

_PLAIN = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError")
_MISTAKES = ("FileExpired", "NoRegionError", "ParamValidationError", "ProfileNotFound")
"""Names of errors that repeating cannot help; FileExpired: the object changed while it was read."""
_ANSWERS = ("ClientResponseError", "HttpError", "HttpResponseError")
"""Errors of http, GCS and Azure that stand for an answer and have its status."""
_NETWORK_LIBRARIES = ("aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "google", "requests", "urllib3")
_PASSING_REFUSALS = (408, 409, 425, 429)
"""Client errors by number that may pass: time-outs, conflicts of concurrent requests, throttling."""
_PASSING_CODES = ("RequestTimeout", "RequestTimeTooSkewed", "Throttling", "SlowDown", "TooManyRequests")

_patience: ContextVar[float | None] = ContextVar("patience", default=None)
logger = logging.getLogger(__name__)


@contextlib.contextmanager
def translated(path: str) -> Iterator[None]:
    """Turn what a store raises at `path` into what it means (see above)."""
    try:
        yield
    except _PLAIN:
        raise
    except Exception as error:
        if isinstance(error, PermissionError) or type(error).__name__ in _NO_CREDENTIALS:
            raise PermanentError(f"no access to {path}: {error}") from error
        if isinstance(error, OSError) or type(error).__module__.split(".")[0] in _NETWORK_LIBRARIES:
            if _is_refusal(error):
                raise PermanentError(f"the store refuses what is asked of {path}: {error}") from error
            raise TransientError(f"storage fault at {path}: {error or type(error).__name__}") from error
        raise


@contextlib.contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Bear faults for so long, in this thread and in this context."""
    token = _patience.set(seconds)
    try:
        yield
    finally:
        _patience.reset(token)


def persistently(path: str, action: Callable[[], T]) -> T:
    """The result of an operation on the store of `path`, its faults translated and borne with patience."""

    def attempt() -> T:
        with translated(path):
            return action()

    return retrying(attempt)


def retrying(action: Callable[[], T]) -> T:
    """The result of `action`, tried again while it raises TransientError and patience lasts. It may be nested."""
    chosen = _patience.get()
    ends = time.monotonic() + (PATIENCE_S if chosen is None else chosen)
    for attempt in itertools.count():
        try:
            return action()
        except TransientError as error:
            pause = random.uniform(0.0, longest_pause_s(attempt))
            if time.monotonic() + pause > ends:
                raise
            if pause >= _SAID_FROM_S:
                logger.warning("%s; trying again in %.0f s", error, pause)
            time.sleep(pause)
    raise AssertionError("unreachable")


def longest_pause_s(attempt: int) -> float:
    """The limit of the pause after attempt 0, 1, 2, ..: 0.5, 1, 2, .. up to 15 seconds."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(attempt, 16))


def _is_refusal(error: BaseException) -> bool:
    """Whether the store, or its client, found the request wrong. Clients wrap what they got; it is the cause then."""
    if type(error).__name__ in _MISTAKES:
        return True
    status, code = _answer_of(error)
    if not status and error.__cause__ is not None:
        status, code = _answer_of(error.__cause__)
    is_passing = status in _PASSING_REFUSALS or any(name in code for name in _PASSING_CODES)
    return 400 <= status < 500 and not is_passing


def _answer_of(error: BaseException) -> tuple[int, str]:
    """HTTP status and error code that an error tells of; 0 and "" where it tells none."""
    answer = getattr(error, "response", None)
    if isinstance(answer, Mapping):
        status: Any = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status, str(answer.get("Error", {}).get("Code", ""))
    if type(error).__name__ not in _ANSWERS:  # aiohttp gives a broken connection the code 400 too
        return 0, ""
    status = next((getattr(error, name) for name in ("status", "status_code", "code") if hasattr(error, name)), 0)
    return (status if isinstance(status, int) else 0), ""
