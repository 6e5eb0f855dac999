from __future__ import annotations

import os
import signal
import threading

import pytest

from pipeline.signals import on_first_signal


@pytest.mark.usefixtures("python_handles_sigint")
def test_the_first_signal_asks_and_the_second_stops() -> None:
    asked: list[str] = []

    def interrupt_twice() -> None:
        with on_first_signal(lambda: asked.append("drain")):
            os.kill(os.getpid(), signal.SIGINT)
            assert asked == ["drain"]
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        interrupt_twice()
    assert asked == ["drain"]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_other_threads_leave_signals_alone() -> None:
    handlers = []

    def look() -> None:
        with on_first_signal(lambda: None):
            handlers.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [before]
