"""Signals that ask the driver to stop."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def on_first_signal(action: Callable[[], None]) -> Iterator[None]:
    """Call `action` on the first SIGINT or SIGTERM; the next one does what it did before."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        restore()
        action()

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        restore()
