from __future__ import annotations

import pytest

from workers.drafters.base import Draft, DraftContext, StepOutcome
from workers.drafters.chains import AcceptanceByDepth, random_of


def tree() -> Draft:
    """1 with children 3 and 4; 2 beside it."""
    return Draft((1, 2, 3, 4), (-1, -1, 0, 0), (0.0,) * 4, ("toy",) * 4)


def test_scores_fall_with_depth_and_rank() -> None:
    scores = AcceptanceByDepth("toy").scored(tree()).scores
    assert scores == pytest.approx((0.3, 0.15, 0.3 * 0.3, 0.3 * 0.15))


def test_only_nodes_below_the_emitted_path_are_graded() -> None:
    acceptance = AcceptanceByDepth("toy")
    before = acceptance.scored(tree()).scores
    for _ in range(100):  # 2 is accepted, so nothing is known about what follows 1
        acceptance.record(StepOutcome(tree(), (2, 3, 9, 9, 9), (0, 2), (2, 9)))
    first, second, below_first, _ = acceptance.scored(tree()).scores
    assert first < 0.05
    assert second > 0.8
    assert below_first / first == pytest.approx(before[2] / before[0])


def test_scores_stay_probabilities() -> None:
    acceptance = AcceptanceByDepth("toy")
    for _ in range(1000):
        acceptance.record(StepOutcome(tree(), (1, 3, 9, 9, 9), (0, 1, 3), (1, 3, 9)))
    scores = acceptance.scored(tree()).scores
    assert 0.95 < scores[2] <= scores[0] <= 1.0


def test_random_is_a_function_of_sample_and_length() -> None:
    context = DraftContext(1, "g", [1, 2, 3], 2)
    drawn = random_of(context).random()
    assert random_of(DraftContext(1, "g", [7, 8, 9], 2)).random() == drawn
    assert random_of(DraftContext(2, "g", [1, 2, 3], 2)).random() != drawn
    assert random_of(DraftContext(1, "g", [1, 2, 3, 4], 2)).random() != drawn
