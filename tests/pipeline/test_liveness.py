from __future__ import annotations

import dataclasses

from pipeline.fleet import Worker
from pipeline.liveness import START_S, silence
from tests.pipeline.test_fleet import SEEN


def test_an_engine_that_stands_still() -> None:
    worker = Worker(0, progress=SEEN)
    assert silence(worker, 0.0, hang_timeout_s=10.0) is None
    worker.progress = dataclasses.replace(SEEN, stalled_s=9.0)
    assert silence(worker, 0.0, hang_timeout_s=10.0) is None
    worker.progress = dataclasses.replace(SEEN, stalled_s=11.0)
    assert silence(worker, 0.0, hang_timeout_s=10.0) == "the engine has finished no step for 11 s"


def test_a_worker_that_does_not_answer() -> None:
    worker = Worker(0, progress=SEEN, asked="ref", asked_at=100.0)
    assert silence(worker, 110.0, hang_timeout_s=10.0) is None
    assert silence(worker, 112.0, hang_timeout_s=10.0) == "the worker has not answered for 12 s"
    worker.asked = None
    assert silence(worker, 999.0, hang_timeout_s=10.0) is None


def test_a_process_that_starts_is_given_more_time() -> None:
    worker = Worker(0, asked="ref", asked_at=0.0)
    assert silence(worker, START_S, hang_timeout_s=10.0) is None
    assert silence(worker, START_S + 1, hang_timeout_s=10.0) is not None
    assert silence(worker, START_S + 1, hang_timeout_s=600.0) is None
