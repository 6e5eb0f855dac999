"""Scores of hand-made drafts, and the oracle: a student that knows the teacher's distributions is never wrong."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.adapter_config import AdaptConfig
from workers.ptp.edges import noise_between, places, token_edges
from workers.ptp.evaluation import draft_tokens, leading_correct, score, shuffled

NONE = AdaptConfig()


def windows(correct: list[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Drafts, tokens and counts: y a right draft, n a wrong one, . (right) and , (wrong) slots that do not count."""
    token = torch.arange(len(correct) * len(correct[0])).view(len(correct), -1)
    draft = token + torch.tensor([[c in "n," for c in row] for row in correct]).long()
    return draft, token, torch.tensor([[c in "yn" for c in row] for row in correct])


def test_worked_example() -> None:
    result = score(*windows(["nyy", "yyy", "yny"]))
    assert result.correct == pytest.approx(4 / 3)
    assert result.accepted == pytest.approx((1 + 3 + 2) / 3)
    assert result.slot == pytest.approx((2 / 3, 1 / 2, 1.0))


def test_windows_cut_short() -> None:
    """Slots that do not count are neither right nor wrong; a window none of whose slots counts is none."""
    draft, token, counts = windows(["yy.", "yn,", "y..", "...", "nyy"])
    assert leading_correct(draft, token, counts).tolist() == [2, 1, 1, 0, 0]
    result = score(draft, token, counts)
    assert result.correct == 4 / 4
    assert result.accepted == (2 + 2 + 1 + 1) / 4
    assert result.slot[:2] == (3 / 4, 1 / 2)
    assert math.isnan(result.slot[2])


@pytest.mark.parametrize("adapt", [NONE, AdaptConfig(temperature=0.7, top_p=0.9), AdaptConfig(top_k=5, min_p=0.02)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_oracle_inverts_every_noise(adapt: AdaptConfig, dtype: torch.dtype) -> None:
    """Head c with the teacher's own logits, float32 noise drawn within the token's interval: correct 1.0 of 1."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(20_000, 400, generator=generator)).to(dtype)
    token = torch.multinomial((logits.float() / adapt.temperature).softmax(-1), 1, generator=generator)[:, 0]
    low, high = token_edges(logits, token, adapt.sampling())
    is_drawable = high - low >= 2.0**-24
    assert is_drawable.float().mean() > 0.5
    logits, token, low, high = (x[is_drawable] for x in (logits, token, low, high))
    u = noise_between(low, high, places((len(low),), 1.0, generator))
    assert u.dtype == torch.float32
    draft = draft_tokens(logits, u, "c", adapt)
    result = score(draft[:, None], token[:, None], torch.ones(len(token), 1, dtype=torch.bool))
    assert result.correct == 1.0


def test_head_o_and_greedy_heads_draft_the_argmax() -> None:
    logits = torch.randn(50, 20)
    u = torch.rand(50)
    assert torch.equal(draft_tokens(logits, u, "o", NONE), logits.argmax(-1))
    assert torch.equal(draft_tokens(logits, u, "c", AdaptConfig(temperature=0.0)), logits.argmax(-1))
    assert not torch.equal(draft_tokens(logits, u, "c", NONE), logits.argmax(-1))


def test_shuffled_noise_is_all_there_and_never_the_own() -> None:
    u = torch.arange(40.0).view(20, 2)
    for seed in range(20):
        other = shuffled(u, torch.Generator().manual_seed(seed))
        assert torch.equal(other.sort(0).values, u)
        assert not (other == u).any()
