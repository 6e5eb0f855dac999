from __future__ import annotations

from dataclasses import replace

from pipeline.fleet import Tally, Worker, tally_of
from pipeline.records import AcceptanceStats, WorkerProgress
from tests.pipeline.makers import make_receipt

SEEN = WorkerProgress("worker-0", "running", 7, 1, 50, 3, 4, AcceptanceStats())


def test_what_a_worker_has_not_handed_in_yet() -> None:
    worker = Worker(0, handle=None)
    assert worker.undelivered() == Tally()
    worker.progress = SEEN
    assert worker.undelivered() == Tally(7, 1, 50)
    worker.delivered += tally_of(make_receipt(0))
    assert worker.undelivered() == Tally(5, 0, 45)
    worker.delivered += Tally(10, 0, 100)  # a receipt may overtake the progress that was asked for before it
    assert worker.undelivered() == Tally()


def test_a_worker_that_was_told_to_end_takes_no_tasks() -> None:
    worker = Worker(0, is_ready=True, progress=SEEN)
    assert (worker.takes_tasks, worker.is_placed) == (True, True)
    worker.progress = replace(SEEN, state="draining")
    assert not worker.takes_tasks
    worker = Worker(0, is_ready=True, progress=SEEN, has_given_back=True)
    assert not worker.takes_tasks, "its progress may be a second old"
    assert Worker(1).shown(is_draining=False).state == "loading"


def test_a_drain_shows() -> None:
    worker = Worker(0, handle=None, progress=SEEN)
    assert worker.shown(is_draining=False) == SEEN
    assert worker.shown(is_draining=True).state == "draining"
