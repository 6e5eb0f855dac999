from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pipeline.decoding_config import AutoConfig
from workers.drafters.auto import AutoDrafter
from workers.drafters.base import EMPTY_DRAFT, DraftContext, StepOutcome
from workers.drafters.native_auto import NativeAutoDrafter
from workers.native.build import NativeUnavailable

AnyDrafter = AutoDrafter | NativeAutoDrafter
Make = Callable[[], AnyDrafter]


@pytest.fixture(params=[AutoDrafter, NativeAutoDrafter])
def make(request: pytest.FixtureRequest) -> Make:
    result: Make = request.param
    try:
        result()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    return result


def observed(drafter: AnyDrafter, context: DraftContext, token: int, top: list[int]) -> None:
    """A step without a draft that emits `token`, with candidates `top` (filled up to eight) after the pending row."""
    top = [*top, *range(900, 908)][:8]
    probs = np.array([[0.6 * 0.5**i for i in range(8)]], np.float32)
    context.tokens.append(token)
    drafter.observe(context, StepOutcome(EMPTY_DRAFT, (token,), (0,), (token,), np.array([top]), probs))


def started(key: int, tokens: list[int], drafter: AnyDrafter) -> DraftContext:
    context = DraftContext(key, f"g{key}", tokens, len(tokens) - 1)
    drafter.start(context)
    return context


def test_each_node_is_named_after_its_true_origin(make: Make) -> None:
    """The prompt says 3 after 1 2; candidates of an earlier row say 50, 51 after the single token 2."""
    drafter = make()
    first = started(0, [7, 2], drafter)
    observed(drafter, first, 50, [50, 51])
    context = started(1, [0, 1, 2, 3, 4, 0, 1, 2], drafter)
    draft = drafter.propose([context], [16], 0.0)[0].draft
    origin = {
        token: name
        for token, parent, name in zip(draft.tokens, draft.parents, draft.drafters, strict=True)
        if parent < 0
    }
    assert origin[3] == "suffix"
    assert origin[50] == origin[51] == "recycling"


def test_agreement_counts_more_than_either_alone(make: Make) -> None:
    def score(prompt_says: int, rows_say: int) -> float:
        drafter = make()
        observed(drafter, started(0, [7, 2], drafter), rows_say, [rows_say])
        context = started(1, [0, 1, 2, prompt_says, 4, 0, 1, 2], drafter)
        draft = drafter.propose([context], [16], 0.0)[0].draft
        return {t: s for t, s, p in zip(draft.tokens, draft.scores, draft.parents, strict=True) if p < 0}[3]

    assert score(3, 3) > score(3, 50)
    assert score(3, 3) > score(60, 3)


def test_one_goes_on_where_the_other_has_led(make: Make) -> None:
    """The suffix match ends at 5, whose candidates are known from an earlier row."""
    drafter = make()
    observed(drafter, started(0, [7, 5], drafter), 60, [60])
    first = started(1, [30, 31, 5], drafter)
    drafter.finish(first)
    context = started(2, [1, 2, 5, 9, 1, 2], drafter)
    draft = drafter.propose([context], [16], 0.0)[0].draft
    five = draft.tokens.index(5)
    names = {(t, p): name for t, p, name in zip(draft.tokens, draft.parents, draft.drafters, strict=True)}
    assert names[(5, -1)] == "suffix"
    assert names[(60, five)] == "recycling"


def test_output_is_plain_decoding(make: Make, engine: Any, model: Any) -> None:
    drafter = make()
    for key in range(3):
        prompt = [5, 6, 7, 8 + key]
        decoded = engine.decode(drafter, model, prompt, max_tokens=150, key=key, group=f"g{key}")
        assert decoded.tokens == engine.plain(model, prompt, 150)


def test_repetition_is_accepted_in_long_strides(make: Make, engine: Any) -> None:
    decoded = engine.decode(make(), lambda prefix: len(prefix) % 7, [3, 4, 5], 200)
    assert decoded.tokens_per_step > 4


def test_scores_become_probabilities(make: Make, engine: Any) -> None:
    """Over a long chaotic text, nodes are accepted about as often as their scores say."""

    def model(prefix: Any) -> int:
        value = 0
        for token in prefix[-3:]:
            value = (value * 31 + token + 7) % 1009
        return value % 11

    decoded = engine.decode(make(), model, [1, 2, 3], 3000)
    late = decoded.outcomes[len(decoded.outcomes) // 2 :]
    expected = sum(sum(outcome.draft.scores) for outcome in late)
    accepted = sum(len(outcome.path) - 1 for outcome in late)
    assert 0.6 < accepted / expected < 1.6


def test_runs_repeat_themselves(make: Make, engine: Any, model: Any) -> None:
    first, second = (engine.decode(make(), model, [5, 6, 7], 80) for _ in range(2))
    assert first.drafts == second.drafts


def test_nodes_below_the_least_score_are_left_out(make: Make, engine: Any) -> None:
    drafter = make()
    engine.decode(drafter, lambda prefix: (prefix[-1] * 31 + prefix[-2] * 17 + 5) % 89, [1, 2, 3], 60)
    context = DraftContext(9, "h", [9, 2, 3], 2)
    drafter.start(context)
    every = drafter.propose([context], [16], 0.0)[0].draft
    some = drafter.propose([context], [16], 0.5)[0].draft
    assert min(every.scores) < 0.5 < max(every.scores)
    assert min(some.scores) >= 0.5
    assert some.tokens[:2] == every.tokens[:2]


def test_samples_are_proposed_for_together(make: Make) -> None:
    drafter = make()
    contexts = [started(key, [0, 1, 2, 3 + key, 4, 0, 1, 2], drafter) for key in range(3)]
    proposals = drafter.propose(contexts, [1, 0, 1], 0.0)
    assert [proposal.draft.tokens for proposal in proposals] == [(3,), (), (5,)]


def test_window_rows_are_offered_with_their_yield(engine: Any) -> None:
    """Blocks such as 20 21 22 23 whose first token alone stands in the prompt: only the window can foresee them."""

    def blocks(prefix: Any) -> int:
        block, place = divmod(prefix[-1], 10)
        return prefix[-1] + 1 if place < 3 else block * 2 % 11 * 10

    prompt = [20, 30, 40, 50, 60, 70, 80, 90, 100, 10]
    drafter = AutoDrafter(lookahead_width=8)
    context = engine.context(blocks, prompt)
    drafter.start(context)
    assert drafter.propose([context], [0], 0.0)[0].extra is None
    first = drafter.propose([context], [4], 0.0)[0]
    assert first.extra is not None
    assert len(first.extra) == 7  # a window of one level, filled in the next steps
    accepted = []
    for _ in range(20):
        outcome = engine.step(drafter, blocks, context, max_rows=12, room=99)
        accepted += [outcome.draft.drafters[row - 1] for row in outcome.path[1:]]
    assert context.tokens[10:] == engine.plain(blocks, prompt, len(context.tokens) - 10)
    assert accepted.count("lookahead") >= 3
    assert len(drafter.propose([context], [4], 0.0)[0].extra) == AutoConfig(lookahead_width=8).extra_rows
    fruitful = drafter.propose([context], [4], 0.0)[0].extra_yield
    for _ in range(100):
        context.tokens.append(context.tokens[-1] + 100)
        drafter.observe(context, fruitless(context.tokens[-1], width=8))
    assert 0 < drafter.propose([context], [4], 0.0)[0].extra_yield < fruitful / 2


def fruitless(token: int, width: int) -> StepOutcome:
    """A step that accepted nothing while its window ran."""
    top = np.arange(700, 708)[None]
    return StepOutcome(EMPTY_DRAFT, (token,), (0,), (token,), top, np.full((1, 8), 0.1, np.float32), (0,) * width)
