"""Lookahead decoding (Fu et al. 2024): a window of guesses feeds a pool of n-grams, which are verified."""

from __future__ import annotations

from collections.abc import Sequence

from workers.drafters.base import EMPTY_PROPOSAL, DraftContext, Proposal, StepOutcome, TreeBuilder
from workers.drafters.chains import AcceptanceByDepth
from workers.drafters.groups import PerGroup
from workers.drafters.lookahead_window import LookaheadWindows
from workers.drafters.ngram_pool import NgramPool


class LookaheadDrafter:
    """W columns, n-grams of N tokens, at most G candidates per step.

    Samples of one prompt share a pool. Where it knows fewer than G continuations, a pool of all prompts' outputs helps
    out, whose size the vocabulary bounds.
    """

    name = "lookahead"
    top_k = 0

    def __init__(self, width: int, ngram: int, candidates: int) -> None:
        self._ngram = ngram
        self._candidates = candidates
        self._windows = LookaheadWindows(width, ngram)
        self._pools = PerGroup(lambda: NgramPool(ngram, candidates))
        self._common = NgramPool(ngram, candidates)
        self._pooled: dict[int, int] = {}  # tokens of a sample that the pools have
        self._acceptance = AcceptanceByDepth(self.name)

    def start(self, context: DraftContext) -> None:
        if self._pools.enter(context.group):
            self._pools[context.group].add_text(context.tokens)
        self._pooled[context.key] = len(context.tokens)
        self._windows.start(context)

    def propose(self, contexts: Sequence[DraftContext], max_rows: Sequence[int], min_score: float) -> list[Proposal]:
        """Candidates as a trie, latest first, and the window's rows beside them (none when no row is allowed).

        The trie has at most G * (N - 1) nodes. What merged and missing candidates leave of them goes to longer
        candidates, continued by the pool's n-grams of their last token.
        """
        return [self._proposal(context, rows) for context, rows in zip(contexts, max_rows, strict=True)]

    def observe(self, context: DraftContext, outcome: StepOutcome) -> None:
        self._acceptance.record(outcome)
        for ngram in self._windows.observe(context, outcome):
            self._pools[context.group].add(ngram)
            self._common.add(ngram)
        self._pool_text(context)

    def finish(self, context: DraftContext) -> None:
        self._pool_text(context)
        del self._pooled[context.key]
        self._windows.finish(context)
        self._pools.leave(context.group)

    def _proposal(self, context: DraftContext, max_rows: int) -> Proposal:
        if max_rows == 0:
            return EMPTY_PROPOSAL
        self._pool_text(context)
        max_rows = min(max_rows, self._candidates * (self._ngram - 1))
        tree = TreeBuilder()
        paths = self._continuations(context, context.tokens[-1])
        while paths and len(tree.tokens) < max_rows:
            for path in paths:
                tree.insert(path, (0.0,) * len(path), self.name, max_rows)
            paths = [path + more[0] for path in paths if (more := self._continuations(context, path[-1]))]
        return Proposal(self._acceptance.scored(tree.build()), self._windows.rows(context))

    def _pool_text(self, context: DraftContext) -> None:
        """The n-grams of the tokens that are new, observed or not, enter the pools."""
        start = self._pooled[context.key] - self._ngram + 1
        text = context.tokens[max(0, start) :]
        self._pools[context.group].add_text(text)
        self._common.add_text(text)
        self._pooled[context.key] = len(context.tokens)

    def _continuations(self, context: DraftContext, token: int) -> list[tuple[int, ...]]:
        """At most G continuations of a token, those of the sample's own prompt first."""
        own = self._pools[context.group].continuations(token)
        common = self._common.continuations(token)
        return list(dict.fromkeys(own + common))[: self._candidates]
