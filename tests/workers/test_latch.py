"""The latch against simulated machines: it finds the better side and pays little for looking."""

from __future__ import annotations

import pytest

from workers.latch import LONGEST_STRETCH, LOOK_TOKENS, WARM_UP_TOKENS, Latch, hopeless, margin


def latch_of(*, cheap: bool = True) -> Latch:
    return Latch(lambda sequences: cheap)


def simulate(
    latch: Latch, steps: int, gain: float, sequences: int = 8, predicted: float = 1.0, waiting: int = 10_000
) -> list[bool]:
    """Steps in which drafts yield `gain` times the tokens per second of plain steps; which of them drafted."""
    sides = []
    for _ in range(steps):
        drafting = latch.drafting(sequences)
        sides.append(drafting)
        latch.record(sequences, drafting, sequences, sequences / (gain if drafting else 1.0), predicted, waiting)
    return sides


def test_drafts_that_lose_are_switched_off_and_looked_at_ever_more_rarely() -> None:
    sides = simulate(latch_of(), 20_000, gain=0.8)
    assert all(sides[: 2 * WARM_UP_TOKENS // 8])
    assert sum(sides[1000:]) / len(sides[1000:]) < 2 * (LOOK_TOKENS // 8) / LONGEST_STRETCH


def test_drafts_that_win_stay_on() -> None:
    sides = simulate(latch_of(), 20_000, gain=1.05)
    assert sum(not side for side in sides[1000:]) / len(sides[1000:]) < 2 * (LOOK_TOKENS // 8) / LONGEST_STRETCH


def test_drafts_that_win_less_than_they_cost_elsewhere_are_off() -> None:
    """Samples that end apart leave slots empty at the end: with one batch to go that counts, with hundreds it does
    not."""
    few, many = (simulate(latch_of(), 5000, gain=1.04, sequences=16, waiting=waiting) for waiting in (32, 10_000))
    assert sum(few[1000:]) < 200
    assert sum(many[1000:]) > 3800


def test_the_margin_of_the_worked_example() -> None:
    assert margin(16, 48) == pytest.approx(1.0375)
    assert margin(16, 1600) == pytest.approx(1.0015, abs=1e-4)
    assert margin(16, 0) == 1.0


def test_alone_a_drafter_gets_more_steps_to_learn_before_it_is_judged() -> None:
    assert all(simulate(latch_of(), 2 * WARM_UP_TOKENS, gain=0.8, sequences=1))


@pytest.mark.parametrize("predicted", [1.0, 10.0])
@pytest.mark.parametrize("sequences", [1, 8])
def test_drafts_that_are_hopeless_are_dropped_at_once(sequences: int, predicted: float) -> None:
    """As on a model so small that drafting takes longer than the step: 2,000 steps lose less than 5 % by it."""
    sides = simulate(latch_of(), 2000, gain=0.4, sequences=sequences, predicted=predicted)
    assert sum(sides[:100]) <= 24
    assert sum(sides) * (1 / 0.4 - 1) < 0.05 * len(sides)


@pytest.mark.parametrize("gain", [0.05, 0.2, 0.5])
def test_a_stretch_is_long_enough_for_what_the_look_before_it_lost(gain: float) -> None:
    """However slow drafts are, looks lose 2 % after the first ones, which come before anything was measured."""
    latch = latch_of(cheap=False)
    simulate(latch, 300, gain, sequences=1)
    sides = simulate(latch, 40_000, gain, sequences=1)
    assert 0 < sum(sides) * (1 / gain - 1) < 0.025 * len(sides)


def test_drafts_that_win_clearly_need_no_look_at_plain_steps() -> None:
    assert all(simulate(latch_of(), 5000, gain=1.5))


def test_a_wrong_prediction_is_found_out_when_drafts_are_slower_than_predicted_plain_steps() -> None:
    """Plain steps are predicted ten times too fast; measured drafts are better all the same."""
    sides = simulate(latch_of(), 5000, gain=1.3, predicted=10.0)
    assert sum(sides) / len(sides) > 0.95


@pytest.mark.parametrize(("before", "after"), [(0.8, 1.3), (1.3, 0.8)])
def test_it_follows_a_change(before: float, after: float) -> None:
    latch = latch_of()
    simulate(latch, 500, before)
    sides = simulate(latch, 8000, after)
    assert (sum(sides[-2000:]) / 2000 > 0.9) == (after > 1)


def test_occupancies_are_judged_apart() -> None:
    latch = latch_of()
    simulate(latch, 1000, gain=0.8, sequences=16)
    assert not latch.drafting(16)
    assert not latch.drafting(13)
    assert latch.drafting(8)
    assert latch.drafting(1)


def test_where_rows_are_dear_it_begins_without_drafts_while_the_drafter_learns() -> None:
    latch = latch_of(cheap=False)
    warm_up = WARM_UP_TOKENS // 8
    assert latch.warming_up(8)
    assert not any(simulate(latch, warm_up, gain=1.3))
    assert not latch.warming_up(8)
    sides = simulate(latch, 1000, gain=1.3)
    assert all(sides[1:])


def test_the_clearer_a_loss_the_fewer_steps_go_into_looking() -> None:
    """Of 1,000 steps at 8 sequences a look takes 16: a small loss is looked at four times, an evident one not to the
    end."""
    looked = [sum(simulate(latch_of(cheap=False), 1000, gain=gain)) for gain in (0.95, 0.85, 0.7, 0.5)]
    assert looked[0] == 4 * LOOK_TOKENS // 8
    assert looked[3] <= looked[2] <= looked[1] < 0.6 * looked[0]


def test_what_is_hopeless_after_some_steps_of_a_look() -> None:
    assert hopeless(16) == pytest.approx(0.7)
    assert hopeless(64) == pytest.approx(0.85)
