"""adapt and pick against transformers' own processors, brute force and chi-square."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pipeline.config import SamplingConfig
from workers.randomness import gumbels, noise_key, streams, uniforms
from workers.sampling import RowHistory, adapt, penalize, pick, scores

VOCABULARY = 3000


def some_logits(rows: int, spread: float, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread


def some_streams(rows: int) -> Tensor:
    return streams([noise_key(0, f"row-{i}", 0) for i in range(rows)], list(range(rows)))


def dense_logp(logits_RV: Tensor, params: SamplingConfig) -> Tensor:
    dense_RV = torch.full_like(logits_RV, -torch.inf)
    seen: list[int] = []
    for rows, adapted in adapt(logits_RV, params):
        seen += rows.tolist()
        ids = torch.arange(logits_RV.shape[1]).expand(len(rows), -1) if adapted.ids_RK is None else adapted.ids_RK
        dense_RV[rows] = dense_RV[rows].scatter(1, ids, adapted.logp_RK)
    assert sorted(seen) == list(range(len(logits_RV)))
    return dense_RV


@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])
@pytest.mark.parametrize(
    "params",
    [
        SamplingConfig(temperature=1.0),
        SamplingConfig(temperature=0.7, top_p=0.95),
        SamplingConfig(temperature=1.3, top_k=40),
        SamplingConfig(temperature=0.7, top_k=50, top_p=0.8),
        SamplingConfig(temperature=1.0, min_p=0.1),
        SamplingConfig(temperature=0.9, top_k=2500, top_p=0.999, min_p=0.001),
    ],
)
def test_adapt_equals_transformers(params: SamplingConfig, spread: float) -> None:
    logits_RV = some_logits(7, spread)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    expected = warpers(torch.zeros(7, 1, dtype=torch.int64), logits_RV).log_softmax(-1)
    torch.testing.assert_close(dense_logp(logits_RV, params), expected, rtol=1e-9, atol=1e-9)


def test_rows_of_all_widths_come_back_once() -> None:
    """Peaked rows need 64 candidates, flatter ones 1,024, flat ones the whole vocabulary."""
    logits_RV = torch.cat([some_logits(2, spread) for spread in (8.0, 2.0, 0.01)])
    groups = adapt(logits_RV, SamplingConfig(temperature=1.0, top_p=0.9))
    assert len(groups) == 3
    assert sorted(row for rows, _ in groups for row in rows.tolist()) == list(range(6))


def test_top_p_breaks_ties_by_token_id() -> None:
    logits_1V = torch.zeros(1, 10)
    kept = dense_logp(logits_1V, SamplingConfig(temperature=1.0, top_p=0.35))[0] > -torch.inf
    assert kept.tolist() == [True] * 4 + [False] * 6


def test_top_k_keeps_what_ties_with_the_kth() -> None:
    logits_1V = torch.tensor([[3.0, 1.0, 2.0, 2.0, 0.0]])
    kept = dense_logp(logits_1V, SamplingConfig(temperature=1.0, top_k=2))[0] > -torch.inf
    assert kept.tolist() == [True, False, True, True, False]


@pytest.mark.parametrize("params", [SamplingConfig(), SamplingConfig(temperature=0.7, top_p=0.95)])
def test_gumbel_pick_is_the_argmax_over_the_whole_vocabulary(params: SamplingConfig) -> None:
    logits_RV, stream_R = some_logits(50, 2.0), some_streams(50)
    noisy_RV = dense_logp(logits_RV, params) + gumbels(stream_R, torch.arange(VOCABULARY).expand(50, -1))
    assert torch.equal(pick(logits_RV, params, stream_R).token_R, noisy_RV.argmax(-1))


@settings(max_examples=120, deadline=None)
@given(
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
    top_p=st.sampled_from([1.0, 0.95, 0.3]),
    top_k=st.sampled_from([0, 1, 20]),
)
def test_inverse_cdf_pick_against_a_loop(
    dtype: torch.dtype, seed: int, spread: float, top_p: float, top_k: int
) -> None:
    params = SamplingConfig(temperature=0.8, top_p=top_p, top_k=top_k, coupling="inverse_cdf")
    logits_RV, stream_R = some_logits(4, spread, seed).to(dtype), some_streams(4)
    picks = pick(logits_RV, params, stream_R)
    logits_RV = logits_RV.double()
    assert picks.low_R is not None
    assert picks.high_R is not None
    for row, u in enumerate(uniforms(stream_R).tolist()):
        probs = dense_logp(logits_RV, params)[row].exp().numpy()
        cumulative, token = 0.0, -1
        for token in np.flatnonzero(probs):
            cumulative += probs[token]
            if cumulative > u:
                break
        assert int(picks.token_R[row]) == token
        assert picks.low_R[row] <= u < picks.high_R[row]
        assert float(picks.high_R[row] - picks.low_R[row]) == pytest.approx(probs[token], abs=1e-6)


@pytest.mark.parametrize("coupling", ["gumbel", "inverse_cdf"])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_pick_does_not_depend_on_its_batch(coupling: str, top_p: float, dtype: torch.dtype) -> None:
    params = SamplingConfig(temperature=0.9, top_p=top_p, coupling=coupling)
    logits_RV, stream_R = torch.cat([some_logits(5, spread) for spread in (6.0, 1.0, 0.05)]).to(dtype), some_streams(15)
    together = pick(logits_RV, params, stream_R).token_R
    alone = [int(pick(logits_RV[i : i + 1], params, stream_R[i : i + 1]).token_R) for i in range(15)]
    assert together.tolist() == alone


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("coupling", ["gumbel", "inverse_cdf"])
def test_picks_follow_the_distribution(coupling: str, dtype: torch.dtype) -> None:
    """Chi-square over 20,000 samples; the control with a slightly different temperature must fail."""
    samples, vocabulary = 20_000, 12
    params = SamplingConfig(temperature=0.8, top_p=0.97, coupling=coupling)
    logits_V = torch.linspace(2.0, -3.0, vocabulary, dtype=dtype)[torch.randperm(vocabulary)]
    stream_R = streams([noise_key(5, f"row-{i}", 0) for i in range(samples)], [3] * samples)
    counts = Counter(pick(logits_V.expand(samples, -1), params, stream_R).token_R.tolist())

    def p_value(expected: SamplingConfig) -> float:
        probs = dense_logp(logits_V.double()[None], expected)[0].exp().numpy()
        kept = np.flatnonzero(probs)
        if set(counts) - set(kept.tolist()):
            return 0.0
        observed = np.array([counts[int(token)] for token in kept])
        return float(stats.chisquare(observed, probs[kept] * samples).pvalue)

    assert p_value(params) > 1e-3
    assert p_value(params.model_copy(update={"temperature": 0.9})) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_greedy_is_argmax_and_takes_the_lowest_of_equals(dtype: torch.dtype) -> None:
    logits_RV = torch.tensor([[0.0, 5.0, 5.0, 1.0]], dtype=dtype)
    assert pick(logits_RV, SamplingConfig(temperature=0.0), some_streams(1)).token_R.tolist() == [1]
    picks = pick(logits_RV, SamplingConfig(temperature=0.0, coupling="inverse_cdf"), some_streams(1))
    assert picks.low_R is not None
    assert picks.high_R is not None
    assert (picks.token_R.tolist(), picks.low_R.tolist(), picks.high_R.tolist()) == ([1], [0.0], [1.0])


def test_repetition_penalty_equals_transformers() -> None:
    logits_RV = some_logits(2, 3.0)
    prompts, outputs = [[4, 5, 6], [7]], [[5, 900, 900], [8]]
    ids = torch.tensor([[4, 5, 6, 5, 900, 900], [7, 7, 7, 7, 7, 8]])
    expected = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits_RV)
    histories = [RowHistory(frozenset(p), Counter(o)) for p, o in zip(prompts, outputs, strict=True)]
    torch.testing.assert_close(penalize(logits_RV, SamplingConfig(repetition_penalty=1.3), histories), expected)


def test_presence_and_frequency_penalties_by_hand() -> None:
    logits_RV = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    history = RowHistory(frozenset({0, 1}), Counter({1: 1, 3: 2}))
    params = SamplingConfig(presence_penalty=0.5, frequency_penalty=0.25)
    assert penalize(logits_RV, params, [history]).tolist() == [[1.0, 1.25, 3.0, 3.0]]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("coupling", ["gumbel", "inverse_cdf"])
def test_scores_are_highest_at_the_pick(coupling: str, temperature: float) -> None:
    params = SamplingConfig(temperature=temperature, top_p=0.9, coupling=coupling)
    logits_RV, stream_R = some_logits(20, 2.0), some_streams(20)
    token_R = pick(logits_RV, params, stream_R).token_R.tolist()
    for row in range(20):
        score_V = scores(logits_RV[row : row + 1], params, stream_R[row : row + 1])
        assert float(score_V[token_R[row]]) == float(score_V.max())
