"""Attempts at shards without workers: what is next, and what follows when one comes back undone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.attempts import Attempts
from pipeline.errors import PermanentError
from pipeline.fleet import Flight
from pipeline.preparation import prepare
from pipeline.retries import Generate, Probe
from tests.pipeline.conftest import MakeJob
from tests.pipeline.makers import write_parquet

MakeAttempts = Callable[..., Attempts]


@pytest.fixture
def make_attempts(tmp_path: Path, make_job: MakeJob) -> MakeAttempts:
    """Of a job with so many shards of two rows."""

    def make(shards: int, *overrides: str) -> Attempts:
        write_parquet(tmp_path / "in.parquet", {"text": ["a"] * 2 * shards})
        return Attempts(prepare(make_job("output.rows_per_shard=2", *overrides)), "run")

    return make


def taken(attempts: Attempts, now: float = 0.0, is_busy: bool = False) -> Flight:
    flight = attempts.take(now, is_busy)
    assert flight is not None
    return flight


def test_a_shard_is_open_until_its_part_is_there(make_attempts: MakeAttempts) -> None:
    attempts = make_attempts(2)
    first, second = taken(attempts), taken(attempts)
    assert attempts.take(0.0, is_busy=False) is None
    assert (attempts.open_shards, attempts.waiting, attempts.are_out) == (2, 0, True)
    for flight in (first, second):
        attempts.came_back(flight)
        assert attempts.delivered(flight, 1.0) == []
    assert (attempts.open_shards, attempts.waiting, attempts.are_out, attempts.redone) == (0, 0, False, 0)


def test_every_attempt_makes_a_part_of_its_own(make_attempts: MakeAttempts) -> None:
    attempts = make_attempts(1)
    names = set()
    for back in (attempts.lost, attempts.died, attempts.faulted):
        flight = taken(attempts, now=100.0)
        names.add(flight.task.part_name)
        attempts.came_back(flight)
        back(flight, "why", 0.0)
    assert len(names) == attempts.redone == 3


def test_what_may_have_ended_a_worker_gets_one_of_its_own(make_attempts: MakeAttempts) -> None:
    attempts = make_attempts(3)
    flight = taken(attempts)
    attempts.came_back(flight)
    attempts.died(flight, "killed", 0.0)
    assert attempts.take(0.0, is_busy=True) is None
    again = taken(attempts)
    assert again.shard_index == flight.shard_index
    assert attempts.needs_own_worker([again])
    attempts.came_back(again)
    attempts.died(again, "killed", 0.0)
    assert taken(attempts).action == Probe(range(1))


def test_what_was_lost_with_its_machine_is_like_new(make_attempts: MakeAttempts) -> None:
    attempts = make_attempts(2)
    flight = taken(attempts)
    attempts.came_back(flight)
    attempts.lost(flight, "the machine is gone", 0.0)
    again = taken(attempts, is_busy=True)
    assert (again.shard_index, again.action) == (flight.shard_index, Generate())
    assert not attempts.needs_own_worker([again])


def with_straggler(attempts: Attempts) -> Flight:
    """Three shards that took a second, and one that is still out after a minute."""
    flights = [taken(attempts) for _ in range(4)]
    for flight in flights[:3]:
        attempts.came_back(flight)
        attempts.delivered(flight, 1.0)
    return flights[3]


def test_a_straggler_is_given_to_a_second_worker_but_not_to_a_third(make_attempts: MakeAttempts) -> None:
    attempts = make_attempts(4)
    straggler = with_straggler(attempts)
    assert attempts.take_straggler(2.0) is None
    second = attempts.take_straggler(60.0)
    assert second is not None
    assert second.shard_index == straggler.shard_index
    assert second.task.part_name != straggler.task.part_name
    assert attempts.take_straggler(600.0) is None

    attempts.came_back(second)
    assert attempts.delivered(second, 61.0) == [straggler]
    assert (attempts.open_shards, attempts.are_out) == (0, False), "nobody waits for the slower one"
    attempts.came_back(straggler)
    attempts.lost(straggler, "withdrawn", 62.0)
    assert (attempts.waiting, attempts.redone) == (0, 0)


def test_while_one_of_two_attempts_goes_on_the_shard_does_not_wait(make_attempts: MakeAttempts) -> None:
    attempts = make_attempts(4)
    straggler = with_straggler(attempts)
    second = attempts.take_straggler(60.0)
    assert second is not None
    attempts.came_back(straggler)
    attempts.died(straggler, "killed", 61.0)
    assert (attempts.waiting, attempts.are_out) == (0, True)
    attempts.came_back(second)
    attempts.died(second, "killed", 62.0)
    assert isinstance(taken(attempts, now=62.0).action, Probe), "two deaths start a search"


def test_shards_with_troubles_get_no_second_attempt_beside_the_first(make_attempts: MakeAttempts) -> None:
    attempts = make_attempts(4)
    straggler = with_straggler(attempts)
    attempts.came_back(straggler)
    attempts.faulted(straggler, "the store was away", 60.0)
    taken(attempts, now=70.0)
    assert attempts.take_straggler(1000.0) is None


def test_no_second_attempt_while_shards_wait(make_attempts: MakeAttempts) -> None:
    attempts = make_attempts(5)
    with_straggler(attempts)
    assert attempts.waiting == 1
    assert attempts.take_straggler(60.0) is None


def test_a_shard_that_cannot_even_be_given_up_ends_the_job(make_attempts: MakeAttempts) -> None:
    attempts = make_attempts(1, "cluster.max_attempts=1")
    for now in (0.0, 100.0):
        flight = taken(attempts, now)
        attempts.came_back(flight)
        if now:
            with pytest.raises(
                PermanentError, match=r"^shard 0 cannot be written, not even as errors: the store is gone$"
            ):
                attempts.faulted(flight, "the store is gone", now)
        else:
            attempts.faulted(flight, "the store is gone", now)
