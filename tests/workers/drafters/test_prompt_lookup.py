from __future__ import annotations

import random
from typing import Any

import pytest

from workers.drafters.base import DraftContext, StepOutcome
from workers.drafters.prompt_lookup import PromptLookupDrafter

A, B, C, D = 1, 2, 3, 4


def drafted(tokens: list[int], rows: int = 4, max_match: int = 3) -> tuple[int, ...]:
    drafter = PromptLookupDrafter(max_match)
    context = DraftContext(0, "g", tokens, 1)
    drafter.start(context)
    return drafter.propose([context], [rows], 0.0)[0].draft.tokens


def test_the_latest_of_equal_matches_is_copied() -> None:
    assert drafted([A, B, C, A, B, D, B]) == (D, B)  # the worked example of its docstring
    assert drafted([A, B, C, A, B, D, B], rows=1) == (D,)


def test_a_longer_match_goes_before_a_later_one() -> None:
    assert drafted([7, A, B, 50, 51, B, 60, 61, A, B], rows=2) == (50, 51)
    assert drafted([7, A, B, 50, 51, B, 60, 61, A, B], rows=2, max_match=1) == (60, 61)


def test_nothing_to_copy() -> None:
    assert drafted([A, B, C]) == ()


def test_the_draft_is_one_chain_whose_scores_follow_what_was_accepted() -> None:
    drafter = PromptLookupDrafter(max_match=3)
    context = DraftContext(0, "g", [A, B, C, D, A], 1)
    drafter.start(context)
    before = drafter.propose([context], [3], 0.0)[0].draft
    assert before.parents == (-1, 0, 1)
    for _ in range(40):  # the first guess is right, the second wrong
        draft = drafter.propose([context], [3], 0.0)[0].draft
        drafter.observe(context, StepOutcome(draft, (draft.tokens[0], 99, 99, 99), (0, 1), (draft.tokens[0], 99)))
    after = drafter.propose([context], [3], 0.0)[0].draft
    assert after.scores[0] > 0.8 > 0.1 > after.scores[1]


@pytest.mark.parametrize("max_match", [1, 3, 8])
def test_agrees_with_a_search_from_end_to_start(max_match: int) -> None:
    generator = random.Random(max_match)
    for _ in range(200):
        tokens = [generator.randrange(3) for _ in range(generator.randrange(1, 30))]
        expected: tuple[int, ...] = ()
        for size in range(min(max_match, len(tokens) - 1), 0, -1):
            starts = [i for i in range(len(tokens) - size) if tokens[i : i + size] == tokens[-size:]]
            if starts:
                expected = tuple(tokens[starts[-1] + size :][:4])
                break
        assert drafted(tokens, max_match=max_match) == expected


def test_repetition_is_accepted_in_full_strides(engine: Any) -> None:
    decoded = engine.decode(PromptLookupDrafter(3), lambda prefix: len(prefix) % 7, [3, 4, 5], 200, max_rows=6)
    assert decoded.tokens_per_step > 4
