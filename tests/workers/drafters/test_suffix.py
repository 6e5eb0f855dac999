from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.drafters.base import EMPTY_DRAFT, DraftContext, StepOutcome
from workers.drafters.suffix import SuffixDrafter, SuffixPredictor


def sample(key: int, group: str, prompt: list[int], output: list[int]) -> DraftContext:
    return DraftContext(key, group, prompt + output, len(prompt))


def emit(drafter: SuffixDrafter, context: DraftContext, *tokens: int) -> None:
    """Steps without a draft, one for each token."""
    for token in tokens:
        context.tokens.append(token)
        drafter.observe(context, StepOutcome(EMPTY_DRAFT, (token,), (0,), (token,)))


def test_what_followed_in_the_prompt_is_drafted() -> None:
    drafter = SuffixDrafter(max_match=16, use_finished=True)
    context = sample(0, "g", [1, 2, 3, 4, 5, 9], [1, 2])
    drafter.start(context)
    draft = drafter.propose([context], [4], 0.0)[0].draft
    assert draft.tokens == (3, 4, 5, 9)
    assert draft.parents == (-1, 0, 1, 2)
    assert set(draft.drafters) == {"suffix"}


def test_branches_come_from_several_matches_and_longer_ones_weigh_more() -> None:
    """1 2 was followed by 3 (after 8, as now), and by 4 (after 9)."""
    predictor = SuffixPredictor(max_match=16, use_finished=False)
    context = sample(0, "g", [8, 1, 2, 3, 9, 1, 2, 4, 7], [8, 1, 2])
    predictor.start(context)
    probabilities, longest = predictor.probabilities(predictor.root(context, len(context.tokens)))
    assert probabilities == pytest.approx({3: 2 / 3, 4: 1 / 3})
    assert longest == 3
    draft = SuffixDrafter(16, False)
    draft.start(context)
    tree = draft.propose([context], [3], 0.0)[0].draft
    assert (tree.tokens[0], tree.parents[0]) == (3, -1)
    assert (4, -1) in set(zip(tree.tokens, tree.parents, strict=True))


def test_a_long_match_is_believed_more_than_a_short_one() -> None:
    scores = {}
    for length in (1, 2, 8):
        drafter = SuffixDrafter(max_match=16, use_finished=False)
        text = list(range(10, 10 + length))
        context = sample(0, "g", [*text, 5, 6], text)
        drafter.start(context)
        scores[length] = drafter.propose([context], [1], 0.0)[0].draft.scores[0]
    assert scores[1] < scores[2] < scores[8]


def test_nothing_to_draft() -> None:
    drafter = SuffixDrafter(max_match=16, use_finished=True)
    context = sample(0, "g", [1, 2, 3], [4])
    drafter.start(context)
    assert len(drafter.propose([context], [8], 0.0)[0].draft) == 0


def test_samples_of_a_prompt_see_each_other_while_they_run() -> None:
    drafter = SuffixDrafter(max_match=16, use_finished=False)
    first, second = sample(0, "g", [1, 2, 3], [7]), sample(1, "g", [1, 2, 3], [7])
    stranger = sample(2, "h", [1, 2, 3], [7])
    for context in (first, second, stranger):
        drafter.start(context)
    emit(drafter, first, 20, 21)
    assert drafter.propose([second], [2], 0.0)[0].draft.tokens == (20, 21)
    assert drafter.propose([stranger], [2], 0.0)[0].draft.tokens == ()


def test_tokens_that_went_by_unobserved_are_matched_too() -> None:
    drafter = SuffixDrafter(max_match=16, use_finished=True)
    context = sample(0, "g", [1, 2, 3], [7])
    drafter.start(context)
    context.tokens += [20, 21, 22, 7]
    assert drafter.propose([context], [2], 0.0)[0].draft.tokens == (20, 21)
    context.tokens += [30, 31, 32]
    drafter.finish(context)
    other = sample(1, "h", [4, 5, 6], [7, 30])
    drafter.start(other)
    assert drafter.propose([other], [2], 0.0)[0].draft.tokens == (31, 32)


def test_finished_outputs_help_other_prompts_only_if_asked() -> None:
    for use_finished, expected in ((True, (21, 22)), (False, ())):
        drafter = SuffixDrafter(max_match=16, use_finished=use_finished)
        first = sample(0, "g", [1, 2, 3], [7])
        drafter.start(first)
        emit(drafter, first, 20, 21, 22)
        drafter.finish(first)
        second = sample(1, "h", [4, 5, 6], [7, 20])
        drafter.start(second)
        assert drafter.propose([second], [2], 0.0)[0].draft.tokens == expected


def test_a_group_is_freed_with_its_last_sample() -> None:
    drafter = SuffixDrafter(max_match=16, use_finished=False)
    first, second = sample(0, "g", [1, 2, 3], [7]), sample(1, "g", [1, 2, 3], [7])
    drafter.start(first)
    drafter.start(second)
    emit(drafter, first, 20, 21)
    drafter.finish(first)
    assert drafter.propose([second], [2], 0.0)[0].draft.tokens == (20, 21)
    drafter.finish(second)
    third = sample(2, "g", [1, 2, 3], [7])
    drafter.start(third)
    assert drafter.propose([third], [2], 0.0)[0].draft.tokens == ()


def test_claims_are_calibrated_by_outcomes() -> None:
    """A text where 1 2 is always followed by something new: the drafter learns that its matches are worth little."""
    drafter = SuffixDrafter(max_match=16, use_finished=False)
    context = sample(0, "g", [1, 2, 3], [1, 2])
    drafter.start(context)
    before = drafter.propose([context], [1], 0.0)[0].draft.scores[0]
    for token in range(100, 160):
        emit(drafter, context, token, 1, 2)
    after = drafter.propose([context], [8], 0.0)[0].draft.scores
    assert sum(after) < before / 2


def test_output_is_plain_decoding(engine: Any, model: Any) -> None:
    drafter = SuffixDrafter(max_match=8, use_finished=True)
    for key in range(3):
        prompt = [5, 6, 7, 8 + key]
        decoded = engine.decode(drafter, model, prompt, max_tokens=150, key=key, group=f"g{key}")
        assert decoded.tokens == engine.plain(model, prompt, 150)


def test_repetition_is_accepted_in_long_strides(engine: Any) -> None:
    decoded = engine.decode(SuffixDrafter(16, True), lambda prefix: len(prefix) % 7, [3, 4, 5], 200)
    assert decoded.tokens_per_step > 6


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=50), st.lists(st.integers(0, 3), max_size=30), st.integers(0, 20)
)
def test_every_tree_is_sound(prompt: list[int], output: list[int], max_rows: int) -> None:
    drafter = SuffixDrafter(max_match=6, use_finished=True)
    for key in range(2):
        context = sample(key, "g", prompt, [])
        drafter.start(context)
        emit(drafter, context, *output)
        draft = drafter.propose([context], [max_rows], 0.0)[0].draft
        assert len(draft) <= max_rows
        assert len(set(zip(draft.parents, draft.tokens, strict=True))) == len(draft)
        assert all(s <= (draft.scores[p] if p >= 0 else 1) for s, p in zip(draft.scores, draft.parents, strict=True))
        drafter.finish(context)
