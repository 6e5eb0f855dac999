from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline import retries
from pipeline.records import Shard
from pipeline.retries import Generate, GiveUp, Probe, Troubles, next_action

SHARD = Shard(0, "a.parquet", start_row=100, num_rows=8)


def play(shard: Shard, poison: set[int], max_attempts: int = 3) -> tuple[Troubles, list[str]]:
    """Run a shard to its end on a worker that dies whenever it decodes a row of `poison`."""
    troubles, history = Troubles(), []
    while True:
        action = next_action(shard, troubles, max_attempts)
        history.append(f"{action.rows.start}-{action.rows.stop - 1}" if isinstance(action, Probe) else str(action))
        if isinstance(action, GiveUp):
            return troubles, history
        rows = action.rows if isinstance(action, Probe) else range(shard.start_row, shard.start_row + shard.num_rows)
        if (poison - set(troubles.dead_rows)) & set(rows):
            troubles = retries.after_death(shard, troubles, action, "killed")
        elif isinstance(action, Probe):
            troubles = retries.after_survival(troubles, action)
        else:
            return troubles, history


def test_the_worked_example() -> None:
    troubles, history = play(SHARD, {105})
    assert troubles.dead_rows == (105,)
    g = "Generate()"
    assert history == [g, g, "100-103", "104-105", "104-104", "105-105", "105-105", g]


@given(st.integers(1, 40), st.sets(st.integers(0, 39), max_size=retries.MAX_DEAD_ROWS))
def test_exactly_the_poisonous_rows_are_found(num_rows: int, poison: set[int]) -> None:
    poison = {row for row in poison if row < num_rows}
    troubles, _ = play(Shard(0, "a", 0, num_rows), poison)
    assert set(troubles.dead_rows) == poison


def test_too_many_poisonous_rows_give_the_shard_up() -> None:
    _, history = play(Shard(0, "a", 0, 20), set(range(20)))
    assert history[-1] == str(GiveUp("worker_crash", "the shard kept ending its worker: killed"))


def test_deaths_that_no_row_explains_give_the_shard_up() -> None:
    troubles = Troubles()
    while not isinstance(action := next_action(SHARD, troubles, 2), GiveUp):
        if isinstance(action, Generate):
            troubles = retries.after_death(SHARD, troubles, action, "out of memory")
        else:
            assert isinstance(action, Probe)
            troubles = retries.after_survival(troubles, action)
    assert troubles.dead_rows == ()
    assert action == GiveUp("worker_crash", "the shard kept ending its worker: out of memory")


def test_faults_are_met_by_attempts_with_growing_pauses() -> None:
    troubles, pauses = Troubles(), []
    for _ in range(3):
        assert next_action(SHARD, troubles, 3) == Generate()
        troubles = retries.after_fault(troubles, "lost")
        pauses.append(retries.pause_s(troubles))
    assert next_action(SHARD, troubles, 3) == GiveUp("shard_failed", "the shard failed 3 times: lost")
    assert pauses == [1.0, 2.0, 4.0]
    assert not retries.is_hopeless(troubles, 3)
    for _ in range(3):
        troubles = retries.after_fault(troubles, "lost")
    assert retries.is_hopeless(troubles, 3)


def test_only_a_shard_that_has_killed_gets_a_worker_for_itself() -> None:
    assert not Troubles().needs_own_worker
    assert not retries.after_fault(Troubles(), "lost").needs_own_worker
    assert retries.after_death(SHARD, Troubles(), Generate(), "killed").needs_own_worker


def test_a_death_while_giving_up_is_no_fault_of_the_rows() -> None:
    troubles = retries.after_death(SHARD, Troubles(faults=3), GiveUp("shard_failed", "lost"), "killed")
    assert (troubles.deaths, troubles.faults) == (0, 4)


def test_losses_are_forgiven_until_there_are_too_many_of_them() -> None:
    troubles = Troubles()
    for count in range(1, 6):
        troubles = retries.after_loss(SHARD, troubles, Generate(), "the machine is gone")
        assert (troubles.losses, troubles.deaths, troubles.needs_own_worker, troubles.is_clean) == (
            count,
            0,
            False,
            True,
        )
        assert retries.pause_s(troubles) == 0.0
    troubles = retries.after_loss(SHARD, troubles, Generate(), "the machine is gone")
    assert (troubles.losses, troubles.deaths, troubles.needs_own_worker) == (0, 1, True)


def test_a_loss_in_a_search_leaves_the_suspects_as_they_are() -> None:
    troubles = Troubles(deaths=2, suspects=range(100, 108))
    lost = retries.after_loss(SHARD, troubles, Probe(range(100, 104)), "drained")
    assert (lost.suspects, lost.deaths) == (range(100, 108), 2)
    assert next_action(SHARD, lost, 3) == Probe(range(100, 104))


def test_a_row_that_was_alone_in_one_death_is_not_dead_yet() -> None:
    """As when workers are killed at random while a search goes on."""
    troubles = Troubles(deaths=2, suspects=range(103, 104))
    once = retries.after_death(SHARD, troubles, Probe(range(103, 104)), "killed")
    assert (once.dead_rows, next_action(SHARD, once, 3)) == ((), Probe(range(103, 104)))
    survived = retries.after_survival(once, Probe(range(103, 104)))
    assert (survived.dead_rows, next_action(SHARD, survived, 3)) == ((), Generate())
    twice = retries.after_death(SHARD, once, Probe(range(103, 104)), "killed")
    assert (twice.dead_rows, next_action(SHARD, twice, 3)) == ((103,), Generate())
