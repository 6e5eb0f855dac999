"""Edges of given tokens against `pick` itself, and noise drawn between them."""

from __future__ import annotations

import pytest
import torch

from pipeline.config import SamplingConfig
from workers.ptp.edges import noise_between, places, token_edges
from workers.randomness import noise_key, streams, uniforms
from workers.sampling import pick_by_tensors

SETTINGS = [
    SamplingConfig(coupling="inverse_cdf"),
    SamplingConfig(coupling="inverse_cdf", temperature=0.7, top_k=5),
    SamplingConfig(coupling="inverse_cdf", temperature=1.3, top_p=0.8),
    SamplingConfig(coupling="inverse_cdf", temperature=0.9, top_k=20, top_p=0.9, min_p=0.01),
]


def random_logits(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return 3.0 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("params", SETTINGS)
def test_edges_are_those_that_picks_report(params: SamplingConfig) -> None:
    logits = random_logits(500, 300)
    stream = streams([noise_key(1, "a", 0)] * 500, list(range(500)))
    picks = pick_by_tensors(logits, params, stream)
    low, high = token_edges(logits, picks.token_R, params)
    assert torch.equal(low, picks.low_R)
    assert torch.equal(high, picks.high_R)


@pytest.mark.parametrize("params", SETTINGS)
def test_a_million_draws_pick_the_token_they_were_drawn_for(params: SamplingConfig) -> None:
    """The distribution's own sums, written here once more, say which token each u picks."""
    rows, draws = 50, 5000  # x 4 settings = 10^6
    generator = torch.Generator().manual_seed(3)
    logits = random_logits(rows, 64, seed=4)
    token = torch.stack([torch.multinomial(row.softmax(-1), draws, True, generator=generator) for row in logits])
    low, high = token_edges(logits.repeat_interleave(draws, 0), token.flatten(), params)
    low, high = low.view(rows, draws), high.view(rows, draws)
    u = noise_between(low, high, places((rows, draws), 1.0, generator))
    assert u.dtype == torch.float32
    kept = high > low
    assert (u.double() < high)[kept].all()
    in_interval = (u.double() >= low) & kept
    width = high - low
    assert in_interval[width >= 2.0**-24].all()
    for r in range(rows):
        cdf = [token_edges(logits[r : r + 1], torch.tensor([v]), params)[1].item() for v in range(64)]
        edges = torch.tensor([c for c in cdf if c > 0.0], dtype=torch.float64)
        names = torch.tensor([v for v, c in enumerate(cdf) if c > 0.0])
        picked = names[torch.searchsorted(edges, u[r].double(), right=True)]
        assert torch.equal(picked[in_interval[r]], token[r][in_interval[r]])


def test_a_token_that_was_cut_has_no_interval() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]] * 2)
    low, high = token_edges(logits, torch.tensor([1, 3]), SamplingConfig(top_k=2, coupling="inverse_cdf"))
    assert high[0] > low[0]
    assert low[1] == high[1] == 0.0
    u = noise_between(low, high, torch.rand(2))
    assert torch.isfinite(u).all()


def test_noise_has_the_engines_grid_and_stays_below_the_upper_edge() -> None:
    low = torch.tensor([0.0, 0.2, 1.0 - 2.0**-24, 0.3, 0.5], dtype=torch.float64)
    high = torch.tensor([2.0**-24, 0.7, 1.0, 0.3 + 2.0**-23, 0.5], dtype=torch.float64)
    for z in (0.0, 0.5, 1.0 - 1e-9):
        u = noise_between(low, high, torch.full((5,), z))
        assert (u.double() < high).all()
        assert (u.double() >= low)[:4].all()
        assert torch.equal(u.double() * 2**24, (u.double() * 2**24).round())
    assert noise_between(low, high, torch.full((5,), 0.5))[1] == pytest.approx(0.45)
    engine = uniforms(streams([noise_key(0, "x", 0)] * 1000, list(range(1000))))
    whole = noise_between(torch.zeros(1000, dtype=torch.float64), torch.ones(1000, dtype=torch.float64), engine)
    assert torch.equal(whole.double(), engine)


@pytest.mark.parametrize(("b", "variance"), [(1.0, 1 / 12), (0.5, 1 / 8), (4.0, 1 / 36)])
def test_places_are_beta(b: float, variance: float) -> None:
    z = places((200_000,), b, torch.Generator().manual_seed(0))
    assert ((z >= 0) & (z <= 1)).all()
    assert z.mean().item() == pytest.approx(0.5, abs=5e-3)
    assert z.var().item() == pytest.approx(variance, rel=0.02)  # of Beta(b, b): 1 / (4 (2 b + 1))
    assert torch.equal(z[:5], places((200_000,), b, torch.Generator().manual_seed(0))[:5])
