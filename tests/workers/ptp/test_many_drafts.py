"""Choosing among sets of noise: what is chosen, that tokens stay as they are, and that drafts get better."""

from __future__ import annotations

import torch
from scipy import stats
from torch import Tensor

from workers.ptp.edges import noise_between, places
from workers.ptp.many_drafts import choose, scores_over_sets


def test_the_middle_is_chosen_and_early_slots_weigh_more() -> None:
    sets = torch.tensor([[[0.5, 0.9], [0.9, 0.5], [0.0, 0.5]], [[0.1, 0.1], [0.4, 0.4], [0.4, 0.6]]])
    assert choose(sets).tolist() == [0, 1]


def test_tokens_keep_their_distribution() -> None:
    """Sets drawn as the engine draws them, chosen by place: their tokens are distributed as before (chi-square)."""
    generator = torch.Generator().manual_seed(0)
    probs = torch.tensor([0.02, 0.28, 0.5, 0.05, 0.15], dtype=torch.float64)
    edges = torch.cat((torch.zeros(1, dtype=torch.float64), probs.cumsum(0)))
    u = torch.rand(20_000, 8, 2, dtype=torch.float64, generator=generator)
    token = torch.searchsorted(edges, u, right=True) - 1
    place = (u - edges[token]) / probs[token]
    chosen = choose(place)
    rows = torch.arange(len(chosen))
    for slot in range(2):
        counts = token[rows, chosen, slot].bincount(minlength=5)
        assert stats.chisquare(counts, 20_000 * probs).pvalue > 1e-3
    assert (place[rows, chosen] - 0.5).abs().mean() < 0.15


def test_more_sets_give_better_drafts() -> None:
    """A student whose edges are off by some of the width: its drafts are right where u is far from the edges."""
    generator = torch.Generator().manual_seed(0)
    N, L = 3000, 6
    low = 0.8 * places((N, L), 1.0, generator)
    high = low + 0.1
    token = torch.randint(100, (N, L), generator=generator)
    off = 0.015 * torch.randn(N, L, generator=generator, dtype=torch.float64)

    def draft(u_NL: Tensor) -> Tensor:
        u_NL = u_NL.double()
        return token + (u_NL >= high + off).long() - (u_NL < low + off).long()

    result = scores_over_sets(draft, low, high, token, torch.ones(N, L, dtype=torch.bool), (1, 16, 256), generator)
    correct = [result[count].correct for count in (1, 16, 256)]
    assert correct == sorted(correct)
    assert correct[1] > correct[0] + 0.8

    def oracle(u_NL: Tensor) -> Tensor:
        u_NL = u_NL.double()
        return token + (u_NL >= high).long() - (u_NL < low).long()

    perfect = scores_over_sets(oracle, low, high, token, torch.ones(N, L, dtype=torch.bool), (1, 4), generator)
    assert perfect[1].correct == perfect[4].correct == L
    one = noise_between(low, high, places((N, L), 1.0, generator))
    assert torch.equal(oracle(one), token)
