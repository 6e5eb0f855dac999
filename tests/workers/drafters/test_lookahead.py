from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from workers.drafters.base import EMPTY_DRAFT, DraftContext, StepOutcome
from workers.drafters.lookahead import LookaheadDrafter


def test_draft_is_the_trie_of_the_pool() -> None:
    drafter = LookaheadDrafter(width=3, ngram=3, candidates=3)
    context = DraftContext(0, "g", [1, 2, 3, 1, 2, 4, 1, 5, 6, 1], 9)
    drafter.start(context)
    draft = drafter.propose([context], [5], 0.0)[0].draft
    assert draft.tokens == (5, 6, 2, 4, 3)  # latest first: 5 6, then 2 4 and 2 3 under one node
    assert draft.parents == (-1, 0, -1, 2, 2)
    assert draft.scores[0] > draft.scores[1]
    assert draft.scores[0] > draft.scores[2] > draft.scores[3] > draft.scores[4]
    assert drafter.propose([context], [3], 0.0)[0].draft.tokens == (5, 6, 2)


def test_rows_that_candidates_leave_continue_them() -> None:
    """G * (N - 1) = 6 nodes at most: one candidate 2 3, then what follows 3, then what follows 5."""
    drafter = LookaheadDrafter(width=3, ngram=3, candidates=3)
    context = DraftContext(0, "g", [1, 2, 3, 4, 5, 6, 7, 8, 9, 1], 9)
    drafter.start(context)
    draft = drafter.propose([context], [64], 0.0)[0].draft
    assert draft.tokens == (2, 3, 4, 5, 6, 7)
    assert draft.parents == (-1, 0, 1, 2, 3, 4)
    assert drafter.propose([context], [4], 0.0)[0].draft.tokens == (2, 3, 4, 5)


def test_tokens_that_went_by_unobserved_enter_the_pools() -> None:
    drafter = LookaheadDrafter(width=3, ngram=3, candidates=3)
    context, other = DraftContext(0, "g", [1, 2], 1), DraftContext(1, "h", [3], 1)
    drafter.start(context)
    drafter.start(other)
    context.tokens += [3, 4, 5]
    drafter.finish(context)
    assert drafter.propose([other], [2], 0.0)[0].draft.tokens == (4, 5)


def test_no_rows_no_window() -> None:
    drafter = LookaheadDrafter(width=3, ngram=3, candidates=5)
    context = DraftContext(0, "g", [1, 2, 1], 2)
    drafter.start(context)
    proposal = drafter.propose([context], [0], 0.0)[0]
    assert len(proposal.draft) == 0
    assert proposal.extra is None


def test_columns_of_a_full_window_enter_the_pool() -> None:
    """N = 3: after two filling steps a window column gives (pending, level 1, predicted)."""
    drafter = LookaheadDrafter(width=2, ngram=3, candidates=2)
    context = DraftContext(0, "g", [1, 2], 1)
    drafter.start(context)
    proposal = drafter.propose([context], [8], 0.0)[0]
    assert proposal.extra is not None
    context.tokens.append(3)
    drafter.observe(context, StepOutcome(proposal.draft, (3,), (0,), (3,), extra_picks=(21,)))
    proposal = drafter.propose([context], [8], 0.0)[0]
    window = proposal.extra
    assert window is not None
    assert window.tokens[1] == 21  # level 1 slid by one: cell (1, 0) was predicted after cell (0, 1)
    context.tokens.append(4)
    drafter.observe(context, StepOutcome(proposal.draft, (4,), (0,), (4,), extra_picks=(31, 32)))
    context.tokens.append(3)  # pending 3 again, unobserved: after the text itself comes its column (3, 21, 31)
    draft = drafter.propose([context], [8], 0.0)[0].draft
    assert list(zip(draft.tokens, draft.parents, strict=True)) == [(4, -1), (3, 0), (21, -1), (31, 2)]


def test_output_is_plain_decoding(engine: Any, model: Any) -> None:
    prompt = [5, 6, 7, 8]
    drafter = LookaheadDrafter(width=4, ngram=4, candidates=4)
    decoded = engine.decode(drafter, model, prompt, max_tokens=150, max_rows=24)
    assert decoded.tokens == engine.plain(model, prompt, 150)


def test_window_finds_ngrams_that_the_text_does_not_hold(engine: Any) -> None:
    """Blocks such as 20 21 22 23 whose first token alone stands in the prompt: only the window can foresee them."""

    def blocks(prefix: Sequence[int]) -> int:
        block, place = divmod(prefix[-1], 10)
        return prefix[-1] + 1 if place < 3 else block * 2 % 11 * 10

    prompt = [20, 30, 40, 50, 60, 70, 80, 90, 100, 10]
    decoded = engine.decode(LookaheadDrafter(8, 4, 8), blocks, prompt, max_tokens=39, max_rows=24)
    assert decoded.tokens == engine.plain(blocks, prompt, 39)
    assert len(set(decoded.tokens)) == 39
    assert decoded.tokens_per_step > 1.5


def test_repetition_is_accepted_whole(engine: Any) -> None:
    decoded = engine.decode(LookaheadDrafter(4, 4, 4), lambda prefix: len(prefix) % 7, [3, 4, 5], 140)
    assert decoded.tokens_per_step > 4
    assert max(len(outcome.emitted) for outcome in decoded.outcomes) == 13  # all G * (N - 1) nodes and the bonus token


def test_samples_of_a_prompt_share_the_pool_until_all_are_finished() -> None:
    """The prompt's n-grams are known to its own samples alone, and forgotten with the last of them."""
    drafter = LookaheadDrafter(width=2, ngram=2, candidates=2)
    first, second = DraftContext(0, "g", [1, 50, 1], 2), DraftContext(1, "g", [1, 50, 1], 2)
    other = DraftContext(2, "h", [1], 1)
    for context in (first, second, other):
        drafter.start(context)
    assert (
        drafter.propose([first], [1], 0.0)[0].draft.tokens
        == drafter.propose([second], [1], 0.0)[0].draft.tokens
        == (50,)
    )
    assert drafter.propose([other], [1], 0.0)[0].draft.tokens == ()
    drafter.finish(first)
    assert drafter.propose([second], [1], 0.0)[0].draft.tokens == (50,)
    drafter.finish(second)
    third = DraftContext(3, "g", [1], 1)
    drafter.start(third)
    assert drafter.propose([third], [1], 0.0)[0].draft.tokens == ()


def test_outputs_help_other_prompts_after_their_own_pool() -> None:
    drafter = LookaheadDrafter(width=2, ngram=2, candidates=2)
    first, other = DraftContext(0, "g", [1, 2, 7], 2), DraftContext(1, "h", [7, 9, 7], 2)
    drafter.start(first)
    drafter.start(other)
    first.tokens.append(8)
    drafter.observe(first, StepOutcome(EMPTY_DRAFT, (8,), (0,), (8,)))
    assert drafter.propose([other], [2], 0.0)[0].draft.tokens == (9, 8)


def test_runs_repeat_themselves() -> None:
    windows = []
    for _run in range(2):
        drafter = LookaheadDrafter(width=6, ngram=3, candidates=2)
        context = DraftContext(4, "g", list(range(50)), 49)
        drafter.start(context)
        windows.append(drafter.propose([context], [4], 0.0)[0].extra)
    assert windows[0] is not None
    assert windows[1] is not None
    assert windows[0].tokens == windows[1].tokens
    assert not windows[0].mask_EE.flags.writeable
    assert np.array_equal(windows[0].mask_EE, windows[1].mask_EE)
