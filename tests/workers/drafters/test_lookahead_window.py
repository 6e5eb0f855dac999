from __future__ import annotations

import random

import pytest

from workers.drafters.base import EMPTY_DRAFT, DraftContext, StepOutcome
from workers.drafters.lookahead_window import Levels, LookaheadWindows, slide, window_rows

_, X = -1, 99


def test_rows_of_a_full_window() -> None:
    """W = 3, N = 4: cells (0,1) (0,2) (1,0) (1,1) (1,2) (2,0) (2,1) (2,2); cell (0,0) is the pending row."""
    rows = window_rows([[_, 11, 12], [20, 21, 22], [30, 31, 32]])
    assert rows.tokens == (11, 12, 20, 21, 22, 30, 31, 32)
    assert rows.offsets == (1, 2, 1, 2, 3, 2, 3, 4)
    assert rows.sampled == (5, 6, 7)
    assert rows.mask_EE.astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0, 0],
        [1, 0, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 0],
        [0, 0, 1, 0, 0, 1, 0, 0],
        [1, 0, 0, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 0, 0, 1],
    ]


def test_rows_of_a_first_window() -> None:
    """One level: a chain behind the pending token; the first sampled cell is the pending row itself."""
    rows = window_rows([[_, 11, 12]])
    assert rows.tokens == (11, 12)
    assert rows.offsets == (1, 2)
    assert rows.sampled == (0, 1)
    assert rows.mask_EE.tolist() == [[True, False], [True, True]]


def test_rows_of_the_smallest_windows() -> None:
    assert len(window_rows([[_]])) == 0
    rows = window_rows([[_], [20]])
    assert (rows.tokens, rows.offsets, rows.sampled) == ((20,), (1,), (0,))
    assert rows.mask_EE.tolist() == [[True]]


@pytest.mark.parametrize(
    ("emitted", "expected"),
    [
        (1, [[20, 21, 22], [30, 31, 32], [40, 41, 42]]),
        (2, [[21, 22, X], [31, 32, X], [41, 42, X]]),
        (3, [[22, X, X], [32, X, X], [42, X, X]]),
        (4, [[X, X, X], [X, X, X], [X, X, X]]),  # a full match: N - 1 drafts and the bonus token, none is lost
        (9, [[X, X, X], [X, X, X], [X, X, X]]),
    ],
)
def test_a_full_window_shifts_up_and_slides(emitted: int, expected: Levels) -> None:
    levels = [[_, 11, 12], [20, 21, 22], [30, 31, 32]]
    assert slide(levels, [40, 41, 42], emitted, max_levels=3, fill=lambda: X) == expected


def test_a_window_that_fills_keeps_its_levels() -> None:
    assert slide([[_, 11, 12]], [20, 21, 22], 1, 3, lambda: X) == [[11, 12, X], [21, 22, X]]
    assert slide([[_, 11, 12]], [20, 21, 22], 2, 3, lambda: X) == [[12, X, X], [22, X, X]]


def test_a_window_that_was_not_run_slides_only() -> None:
    levels = [[_, 11, 12], [20, 21, 22]]
    assert slide(levels, [], 1, 2, lambda: X) == [[11, 12, X], [21, 22, X]]


@pytest.mark.parametrize(("width", "ngram"), [(1, 2), (1, 4), (3, 2), (3, 4), (5, 4), (4, 6)])
def test_slide_equals_bookkeeping_by_position(width: int, ngram: int) -> None:
    """Brute force: cells keep their absolute position for life; a shift only lowers their level by one."""
    generator = random.Random(width * 10 + ngram)
    levels: Levels = [[generator.randrange(1000) for _ in range(width)]]
    pending = 0
    cells = {(0, column): token for column, token in enumerate(levels[0])}  # (level, position) -> token
    for _step in range(60):
        predicted = [generator.randrange(1000) for _ in range(width)]
        emitted = generator.choice([1, 1, 1, 2, 3, ngram])
        for column, token in enumerate(predicted):
            cells[(len(levels), pending + len(levels) + column)] = token
        if len(levels) == ngram - 1:
            cells = {(level - 1, position): token for (level, position), token in cells.items() if level > 0}
        levels = slide(levels, predicted, emitted, ngram - 1, lambda: X)
        pending += emitted
        for level, tokens in enumerate(levels):
            for column, token in enumerate(tokens):
                position = pending + level + column
                if token == X:
                    assert (level, position) not in cells or cells[(level, position)] == X
                    cells[(level, position)] = X
                else:
                    assert cells[(level, position)] == token
    assert len(levels) == ngram - 1


def observed(
    windows: LookaheadWindows, context: DraftContext, token: int, picks: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """A step that emits `token`, with these picks of the window's sampled rows."""
    context.tokens.append(token)
    return windows.observe(context, StepOutcome(EMPTY_DRAFT, (token,), (0,), (token,), extra_picks=picks))


def test_columns_of_a_filled_window_are_ngrams() -> None:
    windows = LookaheadWindows(width=2, ngram=3)
    context = DraftContext(0, "g", [1, 2], 1)
    windows.start(context)
    assert observed(windows, context, 3, (21,)) == []  # the second level: 3 after the pending 2, 21 after cell (0, 1)
    rows = windows.rows(context)
    assert rows is not None
    assert rows.tokens[1] == 21
    right = rows.tokens[0]
    assert observed(windows, context, 4, (31, 32)) == [(3, 21, 31), (right, rows.tokens[2], 32)]


def test_a_window_slides_past_what_went_by_unobserved() -> None:
    windows = LookaheadWindows(width=3, ngram=3)
    context = DraftContext(0, "g", [1, 2], 1)
    windows.start(context)
    observed(windows, context, 3, (21, 22))
    observed(windows, context, 4, (31, 32, 33))
    before = windows.rows(context)
    assert before is not None
    context.tokens += [5]
    after = windows.rows(context)
    assert after is not None
    assert after.tokens[0] == before.tokens[1]
    assert after.tokens[2:4] == before.tokens[3:5]
    assert observed(windows, context, 6, ()) == []  # the rows were not run
    windows.finish(context)
    windows.start(context)
