from __future__ import annotations

from typing import Any, Literal

import pytest

from workers.drafters.base import DraftContext, StepOutcome
from workers.drafters.jacobi import JacobiDrafter

INITS: list[Literal["copy", "random", "suffix"]] = ["copy", "random", "suffix"]


def observed(drafter: JacobiDrafter, context: DraftContext, picks: tuple[int, ...], emitted: int) -> None:
    """A step over a chain whose first `emitted` picks were emitted."""
    draft = drafter.propose([context], [len(picks) - 1], 0.0)[0].draft
    context.tokens.extend(picks[:emitted])
    drafter.observe(context, StepOutcome(draft, picks, tuple(range(emitted)), picks[:emitted]))


def test_outputs_beyond_the_mismatch_are_the_next_guesses() -> None:
    drafter = JacobiDrafter("copy")
    context = DraftContext(0, "g", [1, 2, 3], 2)
    drafter.start(context)
    first = drafter.propose([context], [4], 0.0)[0].draft
    assert first.tokens == (3, 3, 3, 3)
    assert first.parents == (-1, 0, 1, 2)
    observed(drafter, context, (3, 7, 20, 21, 22), emitted=2)  # guess 3 accepted, 7 corrects; 20 21 22 are beyond
    assert drafter.propose([context], [5], 0.0)[0].draft.tokens == (20, 21, 22, 22, 22)
    assert drafter.propose([context], [2], 0.0)[0].draft.tokens == (20, 21)


def test_nothing_is_left_after_a_full_match() -> None:
    drafter = JacobiDrafter("copy")
    context = DraftContext(0, "g", [1, 2, 3], 2)
    drafter.start(context)
    observed(drafter, context, (3, 3, 9), emitted=3)
    assert drafter.propose([context], [2], 0.0)[0].draft.tokens == (9, 9)


def test_guesses_that_went_by_unobserved_are_dropped() -> None:
    drafter = JacobiDrafter("copy")
    context = DraftContext(0, "g", [1, 2, 3], 2)
    drafter.start(context)
    observed(drafter, context, (3, 7, 20, 21), emitted=2)
    context.tokens.append(5)
    assert drafter.propose([context], [3], 0.0)[0].draft.tokens == (5, 5, 5)


def test_a_window_that_was_cut_gives_what_it_has() -> None:
    """The engine may buy fewer rows than were proposed, or none."""
    drafter = JacobiDrafter("copy")
    context = DraftContext(0, "g", [1, 2, 3], 2)
    drafter.start(context)
    observed(drafter, context, (4,), emitted=1)
    assert drafter.propose([context], [2], 0.0)[0].draft.tokens == (4, 4)


def test_random_fill_comes_from_the_prompt_and_repeats_itself() -> None:
    def proposals() -> list[tuple[int, ...]]:
        drafter = JacobiDrafter("random")
        context = DraftContext(3, "g", [*range(100, 200), 7], 100)
        drafter.start(context)
        tokens = [drafter.propose([context], [8], 0.0)[0].draft.tokens]
        context.tokens.append(8)
        return [*tokens, drafter.propose([context], [8], 0.0)[0].draft.tokens]

    first, second = proposals()
    assert set(first) <= set(range(100, 200))
    assert first != second
    assert proposals() == [first, second]


def test_suffix_fill_continues_the_guesses() -> None:
    drafter = JacobiDrafter("suffix")
    context = DraftContext(0, "g", [1, 2, 3, 4, 5, 9, 1, 2], 7)
    drafter.start(context)
    assert drafter.propose([context], [3], 0.0)[0].draft.tokens == (3, 4, 5)
    observed(drafter, context, (8, 3, 4), emitted=1)  # rows 1 and 2 picked 3 4 as the next guesses
    assert drafter.propose([context], [4], 0.0)[0].draft.tokens == (3, 4, 5, 9)


def test_scores_follow_what_was_accepted() -> None:
    drafter = JacobiDrafter("copy")
    context = DraftContext(0, "g", [1, 2, 3], 2)
    drafter.start(context)
    before = drafter.propose([context], [2], 0.0)[0].draft.scores
    for _ in range(50):
        guesses = drafter.propose([context], [2], 0.0)[0].draft.tokens
        observed(drafter, context, (guesses[0], guesses[1] + 1, 5), emitted=2)  # the first is right, the second wrong
    first, second = drafter.propose([context], [2], 0.0)[0].draft.scores
    assert before[0] < 0.5 < 0.8 < first < 1
    assert second < 0.1


@pytest.mark.parametrize("init", INITS)
def test_output_is_plain_decoding(engine: Any, model: Any, init: Literal["copy", "random", "suffix"]) -> None:
    decoded = engine.decode(JacobiDrafter(init), model, [5, 6, 7, 8], max_tokens=120, max_rows=8)
    assert decoded.tokens == engine.plain(model, [5, 6, 7, 8], 120)


def test_jacobi_converges_where_position_decides(engine: Any) -> None:
    """The token depends on the position alone: the second iteration knows all of the window."""
    decoded = engine.decode(JacobiDrafter("copy"), lambda prefix: len(prefix) * 37 % 101, [5, 6], 90, max_rows=8)
    assert decoded.tokens_per_step > 4
