"""The two-dimensional window of lookahead decoding (Fu et al. 2024): rows that guess n-grams beside the drafts.

Levels l = 0..L-1 (L = N-1 once filled), columns j = 0..W-1. Cell (l, j) sits at the position of the pending token
+ l + j, and sees the committed context, cells (0, 0..j) and cells (1..l, j). Cell (0, 0) is the pending token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np

from workers.drafters.base import DraftContext, ExtraRows, StepOutcome
from workers.drafters.chains import random_of

Levels = list[list[int]]
"""Tokens of the cells, [levels][W]. The token of cell (0, 0) is never read: the pending token stands there."""


@cache
def _layout(width: int, levels: int) -> ExtraRows:
    """Offsets, mask and sampled rows of a window; tokens are left to `window_rows`. Rows go level by level.

    Worked example, W = 2 and two levels; rows (0,1), (1,0), (1,1) at offsets 1, 1, 2, the last two sampled:

        sees      (0,1) (1,0) (1,1)
        (0,1)       1     0     0
        (1,0)       0     1     0
        (1,1)       1     0     1
    """
    cells = [(level, column) for level in range(levels) for column in range(width)][1:]
    mask_EE = np.array(
        [
            [(above == 0 and left <= column) or (1 <= above <= level and left == column) for above, left in cells]
            for level, column in cells
        ],
        dtype=np.bool_,
    ).reshape(len(cells), len(cells))
    mask_EE.setflags(write=False)
    return ExtraRows(
        tokens=(0,) * len(cells),
        offsets=tuple(level + column for level, column in cells),
        mask_EE=mask_EE,
        sampled=tuple(i for i, (level, _) in enumerate(cells) if level == levels - 1),
    )


def window_rows(levels: Levels) -> ExtraRows:
    """All cells but (0, 0) as rows; the top level is sampled."""
    tokens = tuple(token for level in levels for token in level)[1:]
    layout = _layout(len(levels[0]), len(levels))
    return ExtraRows(tokens, layout.offsets, layout.mask_EE, layout.sampled)


def slide(levels: Levels, predicted: list[int], emitted: int, max_levels: int, fill: Callable[[], int]) -> Levels:
    """The window after a step that emitted `emitted` tokens.

    `predicted[j]` is the token after cell (top, j), one level above it. While there are fewer than `max_levels` levels
    the predicted tokens become a new one and the columns slide by `emitted`. From then on the levels shift up by one,
    which moves every cell one position ahead, and the columns slide by `emitted` - 1:
    new (l, j) = old (l + 1, j + emitted - 1). Without predictions (the window's rows were not run) nothing shifts up.
    Columns that come free at the far end are filled with `fill()`.

    Worked example, W = 3, two levels of at most two, 2 tokens emitted: [[_, b, c], [d, e, f]] with predicted
    [g, h, i] becomes [[e, f, x], [h, i, y]]: f was three positions ahead of the old pending token, and is one ahead of
    the new one. With at most three levels it becomes [[c, x, x], [f, y, y], [i, z, z]].
    """
    width = len(levels[0])
    grown, shift = [*levels, predicted] if predicted else levels, emitted
    if len(grown) > max_levels:
        grown, shift = grown[1:], emitted - 1
    return [level[shift:] + [fill() for _ in range(min(shift, width))] for level in grown]


class LookaheadWindows:
    """The windows of all samples of a drafter: W columns, n-grams of N tokens."""

    def __init__(self, width: int, ngram: int) -> None:
        self._width = width
        self._ngram = ngram
        self._levels: dict[int, Levels] = {}
        self._positions: dict[int, int] = {}  # tokens of the sample up to its window

    def start(self, context: DraftContext) -> None:
        generator = random_of(context)
        self._positions[context.key] = len(context.tokens)
        self._levels[context.key] = [[generator.choice(context.tokens) for _ in range(self._width)]]

    def rows(self, context: DraftContext) -> ExtraRows | None:
        """The window behind the pending token; None for one that is a single cell."""
        self._slide_to(context, len(context.tokens), [])
        rows = window_rows(self._levels[context.key])
        return rows if len(rows) else None

    def observe(self, context: DraftContext, outcome: StepOutcome) -> list[tuple[int, ...]]:
        """Slide on, and return the n-grams that the columns of a filled window have become: none when its rows were not
        run or tokens went by unobserved."""
        before = len(context.tokens) - len(outcome.emitted)
        self._slide_to(context, before, [])
        levels = self._levels[context.key]
        levels[0][0] = context.tokens[before - 1]
        predicted = list(outcome.extra_picks)
        if len(levels) == 1:
            predicted.insert(0, outcome.picks[0])  # cell (0, 0) is row 0 of the block
        if len(predicted) < self._width:
            predicted = []
        filled = predicted and len(levels) == self._ngram - 1
        ngrams = list(zip(*levels, predicted, strict=True)) if filled else []
        self._slide_to(context, len(context.tokens), predicted)
        return ngrams

    def finish(self, context: DraftContext) -> None:
        del self._levels[context.key], self._positions[context.key]

    def _slide_to(self, context: DraftContext, end: int, predicted: list[int]) -> None:
        key = context.key
        passed = end - self._positions[key]
        if passed:
            fill = partial(random_of(context).choice, context.tokens)
            self._levels[key] = slide(self._levels[key], predicted, passed, self._ngram - 1, fill)
            self._positions[key] = end
