from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from pipeline.errors import Withdrawn
from workers.tasks import Tasks


def test_a_withdrawn_task_is_cancelled_and_begins_nothing_more() -> None:
    tasks = Tasks()
    before: Future[Any] = Future()
    after: Future[Any] = Future()
    with tasks.in_hand("a") as task, tasks.in_hand("b") as other:
        task.awaits(before)
        tasks.withdraw("a")
        task.awaits(after)
        assert before.cancelled()
        assert after.cancelled()
        with pytest.raises(Withdrawn):
            task.check()
        other.check()
    assert not tasks.are_in_hand
    tasks.withdraw("a")


def test_what_a_failed_task_waits_for_is_cancelled() -> None:
    tasks = Tasks()
    future: Future[Any] = Future()

    def fail() -> None:
        with tasks.in_hand("a") as task:
            task.awaits(future)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert future.cancelled()


def test_a_drain_waits_for_the_task_in_hand_and_takes_no_other() -> None:
    tasks = Tasks()
    ends: list[str] = []
    drain = threading.Thread(target=lambda: (tasks.drain(grace_s=60.0), ends.append("drain")))
    with tasks.in_hand("a") as task:
        drain.start()
        while not tasks.is_draining:
            pass
        with pytest.raises(Withdrawn), tasks.in_hand("b"):
            pass
        task.check()
        ends.append("task")
    drain.join(timeout=60.0)
    assert ends == ["task", "drain"]


def test_after_its_grace_a_drain_gives_tasks_back() -> None:
    tasks = Tasks()
    began = threading.Event()
    ends: list[type[BaseException]] = []

    def work() -> None:
        future: Future[Any] = Future()
        try:
            with tasks.in_hand("a") as task:
                task.awaits(future)
                began.set()
                try:
                    future.result()
                except CancelledError:
                    task.check()
        except Withdrawn as error:
            ends.append(type(error))

    worker = threading.Thread(target=work)
    worker.start()
    began.wait()
    tasks.drain(grace_s=0.0)
    assert not tasks.are_in_hand
    worker.join()
    assert ends == [Withdrawn]
