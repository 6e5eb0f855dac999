"""How the rows of a sample are shared by sets of noise, and how chains of several sets become one tree."""

from __future__ import annotations

import pytest

from pipeline.config import SamplingConfig
from workers.drafters.base import Draft, DraftContext
from workers.drafters.growth import Bucket
from workers.drafters.ptp_windows import Guesses, _tree, next_windows
from workers.randomness import key_of_set


def context(output: int, sets: int = 4, stretch: int = 8) -> DraftContext:
    """The last output token was picked by set 2."""
    sampling = SamplingConfig(coupling="inverse_cdf", noise_sets=sets, noise_stretch=stretch)
    return DraftContext(0, "g", [1] * (3 + output), 3, sampling, (5, 6), None, [2] * output)


@pytest.mark.parametrize(
    ("output", "sets", "rows", "most", "expected"),
    [
        (6, 4, 12, 8, [3] * 4),  # 2 tokens of the stretch to come, and one of the next
        (6, 4, 8, 8, [4] * 2),
        (6, 4, 4, 8, [4]),
        (6, 4, 99, 16, [10] * 4),  # to the end of the next stretch
        (8, 4, 3, 8, [1] * 3),  # right before the choice
        (8, 4, 64, 8, [8] * 4),
        (1, 4, 64, 5, [5]),  # the choice is out of reach
        (6, 4, 64, 0, []),
        (6, 1, 12, 8, [8]),
    ],
)
def test_sets_share_the_rows(output: int, sets: int, rows: int, most: int, expected: list[int]) -> None:
    windows = next_windows(context(output, sets), rows, most)
    assert [window.slots for window in windows] == expected
    assert [window.noise_set for window in windows] == list(range(len(expected)))
    assert sum(expected) <= rows


def test_slots_before_the_choice_see_the_noise_of_the_set_that_was_chosen() -> None:
    *_, window = next_windows(context(6), 12, 8)
    keys, indices = window.streams(0, 3)
    assert indices == [6, 7, 8]
    assert keys == [key_of_set((5, 6), chosen) for chosen in (2, 2, 3)]


def test_chains_of_sets_that_agree_add_up() -> None:
    chains = [[(1, 0.9), (2, 0.4), (5, 0.2)], [(1, 0.9), (3, 0.2)], [(1, 0.9), (2, 0.4), (6, 0.1)]]
    draft = _tree(chains, 1, "ptp")
    assert draft == Draft((1, 2, 5, 3, 6), (-1, 0, 1, 0, 1), (0.9, 0.8, 0.2, 0.2, 0.1), ("ptp",) * 5)


def test_a_set_is_taken_with_its_share() -> None:
    """The choice is at guess 1; two of four sets were run."""
    buckets = [Bucket("ptp") for _ in range(4)]
    first, second = ((7, 1.0, buckets[0]), (8, 1.0, buckets[1])), ((7, 1.0, buckets[2]), (9, 1.0, buckets[3]))
    guesses = Guesses(5, (first, second), 1)
    draft = guesses.draft(4, 0.0, "ptp", sets=4)
    assert (draft.tokens, draft.parents) == ((7, 8, 9), (-1, 0, 0))
    assert draft.scores[1] == draft.scores[0] * buckets[1].scale / 4
    assert guesses.draft(4, draft.scores[0] / 2, "ptp", sets=4).tokens == (7,)


@pytest.mark.parametrize(("taken", "emitted", "graded"), [(1, (7, 9), (2, 3)), (0, (7, 9), (0, 1)), (3, (7, 9), (0,))])
def test_the_chain_of_the_set_that_was_taken_is_graded(
    taken: int, emitted: tuple[int, ...], graded: tuple[int, ...]
) -> None:
    buckets = [Bucket("ptp") for _ in range(4)]
    first, second = ((7, 0.5, buckets[0]), (8, 0.5, buckets[1])), ((7, 0.5, buckets[2]), (9, 0.5, buckets[3]))
    Guesses(5, (first, second), 1).grade(emitted, [2, taken])
    assert tuple(i for i, bucket in enumerate(buckets) if bucket.expected) == graded
