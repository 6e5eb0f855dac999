"""An adapter's chains and model-free drafts in one tree, and what the chains' branches are then worth."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.drafters.base import Branch, Draft, DraftContext, Proposal, StepOutcome
from workers.drafters.merged import MergedDrafter


class Fixed:
    """Proposes the same every time."""

    top_k = 0

    def __init__(self, name: str, proposal: Proposal) -> None:
        self.name = name
        self._proposal = proposal
        self.read: list[Sequence[Tensor]] = []

    def start(self, context: DraftContext) -> None:
        pass

    def propose(self, contexts: Sequence[DraftContext], max_rows: Sequence[int], min_score: float) -> list[Proposal]:
        return [self._proposal] * len(contexts)

    def observe(self, context: DraftContext, outcome: StepOutcome) -> None:
        pass

    def read_branches(self, contexts: Sequence[DraftContext], logits: Sequence[Tensor]) -> None:
        self.read.append(logits)

    def finish(self, context: DraftContext) -> None:
        pass


CHAIN = Draft.chain((2, 3), "ptp", (0.6, 0.3))
TREE = Draft((2, 4, 5), (-1, 0, -1), (0.7, 0.2, 0.1), ("suffix",) * 3)


def branch(depth: int) -> Branch:
    return Branch(depth, torch.zeros(2, 4), 1, gain=1.0 / (1 + depth))


def merged(chain: Draft = CHAIN, tree: Draft = TREE) -> MergedDrafter:
    first = Fixed("ptp", Proposal(chain, branches=(branch(0), branch(2))))
    return MergedDrafter(first, Fixed("auto", Proposal(tree)))


def proposal_of(drafter: MergedDrafter, rows: int = 8) -> Proposal:
    context = DraftContext(1, "g", [9], 1)
    (proposal,) = drafter.propose([context], [rows], 0.0)
    return proposal


def gain_of(drafter: MergedDrafter) -> float:
    return proposal_of(drafter).branches[0].gain


def step(drafter: MergedDrafter, path: tuple[int, ...], emitted: tuple[int, ...]) -> None:
    proposal = proposal_of(drafter)
    picks = (0,) * (1 + len(proposal.draft))
    drafter.observe(DraftContext(1, "g", [9, *emitted], 1), StepOutcome(proposal.draft, picks, path, emitted))


def test_what_both_guess_is_one_node_with_the_better_score() -> None:
    draft = proposal_of(merged()).draft
    assert draft.tokens == (2, 3, 4, 5)
    assert draft.parents == (-1, 0, 0, -1)
    assert draft.scores == (0.7, 0.3, 0.2, 0.1)
    assert draft.drafters == ("ptp", "ptp", "suffix", "suffix")


def test_branches_need_their_chain() -> None:
    assert [b.depth for b in proposal_of(merged(), rows=2).branches] == [0, 2]
    assert [b.depth for b in proposal_of(merged(), rows=1).branches] == [0]


def test_branches_are_worth_what_chains_add() -> None:
    """Token 2 was guessed by both, token 3 by the chain alone."""
    useful, useless = merged(), merged()
    assert [b.gain for b in proposal_of(useful).branches] == [1.0, 1 / 3]
    for _ in range(400):
        step(useful, (0, 1, 2), (2, 3, 7))
        step(useless, (0, 1), (2, 7))
    assert 0.5 <= gain_of(useful) < 0.52
    assert gain_of(useless) < 0.05


def test_a_model_free_path_beside_the_chain_is_no_merit_of_it() -> None:
    drafter = merged()
    for _ in range(400):
        step(drafter, (0, 1, 3), (2, 4, 7))
    assert gain_of(drafter) < 0.05


def test_a_useless_chain_is_worth_trying_again_when_the_other_stops_guessing() -> None:
    drafter = merged(tree=Draft())
    for _ in range(400):
        step(drafter, (0, 1, 2), (2, 3, 7))
    assert gain_of(drafter) == 1.0
