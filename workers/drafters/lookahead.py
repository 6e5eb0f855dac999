"""Lookahead decoding (Fu et al. 2024): a two-dimensional window of guesses feeds a pool of n-grams, which are verified.

Window: levels l = 0..L-1 (L = N-1 once filled), columns j = 0..W-1. Cell (l, j) sits at the position of the pending
token + l + j, and sees the committed context, cells (0, 0..j) and cells (1..l, j). Cell (0, 0) is the pending token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np

from workers.drafters.base import DraftContext, ExtraRows, Proposal, StepOutcome, TreeBuilder
from workers.drafters.chains import AcceptanceByDepth, random_of
from workers.drafters.groups import PerGroup
from workers.drafters.ngram_pool import NgramPool

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


class LookaheadDrafter:
    """W columns, n-grams of N tokens, at most G candidates per step.

    Samples of one prompt share a pool. Where it knows fewer than G continuations, a pool of all prompts' outputs helps
    out, whose size the vocabulary bounds.
    """

    name = "lookahead"
    top_k = 0

    def __init__(self, width: int, ngram: int, candidates: int) -> None:
        self._width = width
        self._ngram = ngram
        self._windows: dict[int, Levels] = {}
        self._candidates = candidates
        self._pools = PerGroup(lambda: NgramPool(ngram, candidates))
        self._common = NgramPool(ngram, candidates)
        self._acceptance = AcceptanceByDepth(self.name)

    def start(self, context: DraftContext) -> None:
        if self._pools.enter(context.group):
            self._pools[context.group].add_text(context.tokens)
        generator = random_of(context)
        self._windows[context.key] = [[generator.choice(context.tokens) for _ in range(self._width)]]

    def propose(self, context: DraftContext, max_rows: int) -> Proposal:
        """Candidates as a trie, latest first, and the window's rows beside them (none when no row is allowed).

        The trie has at most G * (N - 1) nodes. What merged and missing candidates leave of them goes to longer
        candidates, continued by the pool's n-grams of their last token.
        """
        if max_rows == 0:
            return Proposal()
        max_rows = min(max_rows, self._candidates * (self._ngram - 1))
        tree = TreeBuilder()
        paths = self._continuations(context, context.tokens[-1])
        while paths and len(tree.tokens) < max_rows:
            for path in paths:
                tree.insert(path, (0.0,) * len(path), self.name, max_rows)
            paths = [path + more[0] for path in paths if (more := self._continuations(context, path[-1]))]
        draft = self._acceptance.scored(tree.build())
        window = window_rows(self._windows[context.key])
        return Proposal(draft, window if len(window) else None)

    def observe(self, context: DraftContext, outcome: StepOutcome) -> None:
        self._acceptance.record(outcome)
        pool = self._pools[context.group]
        levels = self._windows[context.key]
        emitted = len(outcome.emitted)
        levels[0][0] = context.tokens[-emitted - 1]
        predicted = list(outcome.extra_picks)
        if len(levels) == 1:
            predicted.insert(0, outcome.picks[0])  # cell (0, 0) is row 0 of the block
        if len(predicted) < self._width:  # the engine had no room for the window
            predicted = []
        if predicted and len(levels) == self._ngram - 1:
            for ngram in zip(*levels, predicted, strict=True):
                pool.add(ngram)
                self._common.add(ngram)
        text = context.tokens[-(emitted + self._ngram - 1) :]
        pool.add_text(text)
        self._common.add_text(text)
        generator = random_of(context)
        fill = partial(generator.choice, context.tokens)
        self._windows[context.key] = slide(levels, predicted, emitted, self._ngram - 1, fill)

    def finish(self, context: DraftContext) -> None:
        del self._windows[context.key]
        self._pools.leave(context.group)

    def _continuations(self, context: DraftContext, token: int) -> list[tuple[int, ...]]:
        """At most G continuations of a token, those of the sample's own prompt first."""
        own = self._pools[context.group].continuations(token)
        common = self._common.continuations(token)
        return list(dict.fromkeys(own + common))[: self._candidates]
