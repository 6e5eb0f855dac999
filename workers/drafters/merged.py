"""Two drafters in one tree: the chain of an adapter and what a model-free drafter guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from workers.drafters.base import (
    EMPTY_DRAFT,
    BranchingDrafter,
    Draft,
    DraftContext,
    Drafter,
    Proposal,
    StepOutcome,
    TreeBuilder,
)
from workers.window_policy import best_nodes

_MEMORY = 500.0  # accepted nodes of chains after which old ones begin to fade
_PRIOR = 8.0  # accepted nodes that are believed to be the chains' own merit at first, so that branches get tried


class MergedDrafter:
    """`first` drafts chains, which keep the first places of the tree, as its branches want. What both guess is one
    node, with the better of both scores.

    Branches are worth what chains add: accepted tokens that `second` had not guessed as well.
    """

    def __init__(self, first: BranchingDrafter, second: Drafter) -> None:
        self._first = first
        self._second = second
        self.name = second.name
        self.top_k = max(first.top_k, second.top_k)
        self._trees: dict[int, Draft] = {}  # what `second` alone proposed for the step in progress
        self._accepted = self._added = _PRIOR  # nodes of chains, and those of them that were their own merit

    def start(self, context: DraftContext) -> None:
        for drafter in (self._first, self._second):
            drafter.start(context)

    def propose(self, contexts: Sequence[DraftContext], max_rows: Sequence[int], min_score: float) -> list[Proposal]:
        chains, trees = (drafter.propose(contexts, max_rows, min_score) for drafter in (self._first, self._second))
        merged = []
        for context, chain, tree, rows in zip(contexts, chains, trees, max_rows, strict=True):
            self._trees[context.key] = tree.draft
            (draft,) = best_nodes([_merged(chain.draft, tree.draft)], rows)
            branches = [
                replace(branch, gain=branch.gain * self._added / self._accepted)
                for branch in chain.bought(draft).branches
            ]
            merged.append(Proposal(draft, tree.extra, tree.extra_yield, tuple(branches)))
        return merged

    def observe(self, context: DraftContext, outcome: StepOutcome) -> None:
        for drafter in (self._first, self._second):
            drafter.observe(context, outcome)
        tree = self._trees.pop(context.key, EMPTY_DRAFT)
        accepted = len(outcome.path) - 1
        of_chain = sum(outcome.draft.drafters[row - 1] == self._first.name for row in outcome.path[1:])
        self._accepted += of_chain
        self._added += min(of_chain, accepted - _foreseen(tree, outcome.emitted[:accepted]))
        if self._accepted > _MEMORY:
            self._accepted /= 2
            self._added /= 2

    def read_branches(self, contexts: Sequence[DraftContext], logits: Sequence[Tensor]) -> None:
        self._first.read_branches(contexts, logits)

    def finish(self, context: DraftContext) -> None:
        self._trees.pop(context.key, None)
        for drafter in (self._first, self._second):
            drafter.finish(context)


def _merged(first: Draft, second: Draft) -> Draft:
    """Worked example, first b c, second b d (two nodes below each other): b, c, d with parents -1, 0, 0."""
    builder = TreeBuilder()
    for tree in (first, second):
        node: list[int] = []
        for token, parent, score, drafter in zip(tree.tokens, tree.parents, tree.scores, tree.drafters, strict=True):
            node.append(builder.add(-1 if parent < 0 else node[parent], token, score, drafter))
    return builder.build()


def _foreseen(tree: Draft, tokens: Sequence[int]) -> int:
    """How many of the tokens, from the first on, lie on a path of the tree."""
    node_of = {
        (parent, token): node for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))
    }
    node = -1
    for depth, token in enumerate(tokens):
        if (node, token) not in node_of:
            return depth
        node = node_of[node, token]
    return len(tokens)
