"""Two drafters in one tree: the chain of an adapter and what a model-free drafter guesses."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workers.drafters.base import BranchingDrafter, Draft, DraftContext, Drafter, Proposal, StepOutcome, TreeBuilder
from workers.window_policy import best_nodes


class MergedDrafter:
    """`first` drafts chains, which keep the first places of the tree, as its branches want. What both guess is one
    node, with the better of both scores."""

    def __init__(self, first: BranchingDrafter, second: Drafter) -> None:
        self._first = first
        self._both: tuple[Drafter, Drafter] = (first, second)
        self.name = second.name
        self.top_k = max(first.top_k, second.top_k)

    def start(self, context: DraftContext) -> None:
        for drafter in self._both:
            drafter.start(context)

    def propose(self, contexts: Sequence[DraftContext], max_rows: Sequence[int], min_score: float) -> list[Proposal]:
        first, second = (drafter.propose(contexts, max_rows, min_score) for drafter in self._both)
        merged = []
        for chain, tree, rows in zip(first, second, max_rows, strict=True):
            (draft,) = best_nodes([_merged(chain.draft, tree.draft)], rows)
            branches = chain.bought(draft, extra=True).branches
            merged.append(Proposal(draft, tree.extra, chain.extra_yield + tree.extra_yield, branches))
        return merged

    def observe(self, context: DraftContext, outcome: StepOutcome) -> None:
        for drafter in self._both:
            drafter.observe(context, outcome)

    def read_branches(self, contexts: Sequence[DraftContext], logits: Sequence[Tensor]) -> None:
        self._first.read_branches(contexts, logits)

    def finish(self, context: DraftContext) -> None:
        for drafter in self._both:
            drafter.finish(context)


def _merged(first: Draft, second: Draft) -> Draft:
    """Worked example, first b c, second b d (two nodes below each other): b, c, d with parents -1, 0, 0."""
    builder = TreeBuilder()
    for tree in (first, second):
        node: list[int] = []
        for token, parent, score, drafter in zip(tree.tokens, tree.parents, tree.scores, tree.drafters, strict=True):
            node.append(builder.add(-1 if parent < 0 else node[parent], token, score, drafter))
    return builder.build()
