"""Exact teachers against sums over all hidden paths, counted frequencies and their own tables."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from pipeline.config import SamplingConfig
from pipeline.train_config import ExactTeacherConfig
from workers.ptp.exact_teachers import HiddenMarkovTeacher, MarkovTeacher, make_teacher

PLAIN = SamplingConfig(coupling="inverse_cdf")
SHARP = SamplingConfig(coupling="inverse_cdf", temperature=0.7, top_k=3)


def teacher_of(**settings: Any) -> Any:
    return make_teacher(ExactTeacherConfig.model_validate({"vocabulary": 5, "concentration": 0.6, **settings}))


def logp_after(teacher: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    state = teacher.start(1)
    for token in tokens:
        state = teacher.after(state, torch.tensor([token]))
    return teacher.logp(state)[0]


def test_a_hidden_chain_agrees_with_the_sum_over_all_paths() -> None:
    teacher = teacher_of(kind="hmm", states=3)
    assert isinstance(teacher, HiddenMarkovTeacher)
    moves, emits = teacher._moves_ZZ, teacher._emits_ZV
    seen = (4, 1, 0)

    def probability(tokens: tuple[int, ...]) -> float:
        total = 0.0
        for path in itertools.product(range(3), repeat=len(tokens)):
            p = 1 / 3
            for i, (state, token) in enumerate(zip(path, tokens, strict=True)):
                p *= (1.0 if i == 0 else moves[path[i - 1], state].item()) * emits[state, token].item()
            total += p
        return total

    expected = torch.tensor([probability((*seen, token)) / probability(seen) for token in range(5)])
    torch.testing.assert_close(logp_after(teacher, seen).exp().float(), expected)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_chain_remembers_as_many_tokens_as_its_order(order: int) -> None:
    teacher = teacher_of(order=order)
    assert isinstance(teacher, MarkovTeacher)
    recent = (3, 0, 4)[-order:]
    assert torch.equal(logp_after(teacher, (1, 2, *recent)), logp_after(teacher, (4, 4, 1, *recent)))
    changed = ((recent[0] + 1) % 5, *recent[1:])
    assert not torch.equal(logp_after(teacher, (1, *recent)), logp_after(teacher, (1, *changed)))


@pytest.mark.parametrize("kind", ["markov", "hmm"])
def test_rows_are_distributions_without_zeros(kind: str) -> None:
    teacher = teacher_of(kind=kind, concentration=0.01)
    logp = logp_after(teacher, (2, 3))
    assert torch.isfinite(logp).all()
    assert logp.exp().sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("kind", ["markov", "hmm"])
@pytest.mark.parametrize("params", [PLAIN, SHARP])
def test_edges_of_samples_are_sums_of_the_adapted_probabilities(kind: str, params: SamplingConfig) -> None:
    teacher = teacher_of(kind=kind)
    ids, low, high = teacher.sample(4, 6, params, torch.Generator().manual_seed(1))
    for row in range(4):
        for s in range(6):
            logp = logp_after(teacher, tuple(ids[row, :s].tolist())) / params.temperature
            if params.top_k:
                logp = logp.masked_fill(logp < logp.topk(params.top_k).values[-1], -torch.inf)
            cdf = torch.cat((torch.zeros(1, dtype=torch.float64), logp.softmax(-1).cumsum(-1)))
            token = int(ids[row, s])
            assert low[row, s].item() == pytest.approx(cdf[token].item(), abs=1e-9)
            assert high[row, s].item() == pytest.approx(cdf[token + 1].item(), abs=1e-9)


def test_tokens_come_as_often_as_the_table_says() -> None:
    teacher = teacher_of(order=1)
    ids, _, _ = teacher.sample(400, 50, PLAIN, torch.Generator().manual_seed(2))
    before, after = ids[:, :-1].flatten(), ids[:, 1:].flatten()
    for token in range(5):
        seen = after[before == token]
        if len(seen) < 500:
            continue
        share = torch.bincount(seen, minlength=5) / len(seen)
        torch.testing.assert_close(share, logp_after(teacher, (token,)).exp().float(), atol=0.06, rtol=0.0)


def test_a_seed_decides_the_tables_and_a_generator_the_samples() -> None:
    first, second = (teacher_of(seed=seed).sample(8, 20, PLAIN, torch.Generator().manual_seed(3)) for seed in (0, 0))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    other = teacher_of(seed=1).sample(8, 20, PLAIN, torch.Generator().manual_seed(3))
    assert not torch.equal(first[0], other[0])
