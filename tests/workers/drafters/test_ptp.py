from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from pipeline.config import EngineConfig, ModelConfig, SamplingConfig
from pipeline.decoding_config import PTPConfig
from pipeline.errors import ConfigError
from workers.drafters.base import Draft, DraftContext
from workers.drafters.build import adapter_of, build_drafter
from workers.drafters.merged import _merged
from workers.drafters.ptp import PTPDrafter, _likely_depths
from workers.drafters.ptp_windows import Guesses
from workers.engine import Engine, Request
from workers.model_loading import LoadedModel, load_model
from workers.model_runner import ModelRunner
from workers.randomness import NoiseKey

SAMPLING = SamplingConfig(temperature=0.8, max_tokens=40, seed=2, coupling="inverse_cdf", ignore_eos=True)
REQUESTS = [Request(f"row-{i}", tuple(range(5 + i, 30)), SAMPLING) for i in range(3)]


@pytest.fixture(scope="module")
def target(tiny_model_dir: Callable[[str], Path]) -> LoadedModel:
    return load_model(ModelConfig(id=str(tiny_model_dir("llama")), dtype="float64"))


def engine_of(target: LoadedModel, adapter: Path, **settings: Any) -> Engine:
    return Engine(target, EngineConfig(), PTPConfig(adapter=str(adapter), **settings))


@pytest.mark.parametrize("max_sequences", [1, 3])
def test_slots_that_draw_from_the_base_are_always_right(
    target: LoadedModel, adapter_dir: Callable[..., Path], max_sequences: int
) -> None:
    """Slot 0 of such an adapter is plain decoding under the same noise: every serial step accepts its draft."""
    config = PTPConfig(adapter=str(adapter_dir("llama", head="c")), mode="serial")
    engine = Engine(target, EngineConfig(max_sequences=max_sequences), config)
    for result in engine.generate(REQUESTS):
        first, *rest = result.stats.acceptance_histogram
        # the first step has no draft, the last one cannot use any
        assert first <= 2
        assert sum(rest) >= 15
        assert result.stats.accepted_by_drafter.keys() == {"ptp"}


def test_greedy_samples_accept_slots_that_draw_from_the_base(
    target: LoadedModel, adapter_dir: Callable[..., Path]
) -> None:
    greedy = SAMPLING.model_copy(update={"temperature": 0.0})
    engine = engine_of(target, adapter_dir("llama", head="c"), mode="serial")
    (result,) = engine.generate([Request("row", (5, 6, 7), greedy)])
    assert result.stats.mean_acceptance_length > 1.9


class Oracle(PTPDrafter):
    """Reads true tokens into the branches' places, as a perfect adapter would."""

    truth: dict[NoiseKey, tuple[int, ...]]
    read: int

    def read_branches(self, contexts: Any, logits: Any) -> None:
        self.read += len(contexts)
        told: list[Tensor] = []
        for context, rows_RV in zip(contexts, logits, strict=True):
            ahead = self.truth[context.noise][len(context.tokens) - context.prompt_length :]
            sure_RV = torch.full_like(rows_RV, -50.0)
            for row, token in zip(sure_RV, ahead, strict=False):
                row[token] = 50.0
            told.append(sure_RV)
        super().read_branches(contexts, told)


@pytest.mark.parametrize("head", ["o", "c"])
@pytest.mark.parametrize("branches", [1, 4])
def test_the_branch_that_fits_holds_the_next_drafts(
    target: LoadedModel, adapter_dir: Callable[..., Path], head: str, branches: int
) -> None:
    """With right guesses in whatever branch is read, a chain of 5 is accepted whole in almost every step."""
    plain = {r.uid: r.token_ids for r in engine_of(target, adapter_dir("llama", head="c")).generate(REQUESTS)}
    engine = engine_of(target, adapter_dir("llama", head=head), mode="one_pass", branches=branches, max_window=5)
    assert engine.speculation is not None
    drafter = engine.speculation._drafter
    assert isinstance(drafter, PTPDrafter)
    drafter.__class__ = Oracle
    assert isinstance(drafter, Oracle)
    drafter.read, drafter.truth = 0, {}
    submit = engine.scheduler.submit

    def noting(samples: Any) -> None:
        drafter.truth.update({sample.noise: plain[sample.request.uid] for sample in samples})
        submit(samples)

    engine.scheduler.submit = noting  # type: ignore[method-assign]
    results = engine.generate(REQUESTS)
    assert {r.uid: r.token_ids for r in results} == plain
    assert drafter.read > 0
    assert all(result.stats.mean_acceptance_length > 4.0 for result in results)


@pytest.mark.parametrize("slot_zero", ["context_token", "plain"])
@pytest.mark.parametrize("max_tokens_per_step", [4096, 16])
def test_a_smaller_model_reads_along(
    target: LoadedModel,
    tiny_model_dir: Callable[[str], Path],
    adapter_dir: Callable[..., Path],
    max_tokens_per_step: int,
    slot_zero: str,
) -> None:
    """The target itself as the "smaller" model, with a cache of its own, drafts what the serial mode drafts, also where
    prompts are longer than a forward may be."""
    folder = str(adapter_dir("llama", head="c", slot_zero=slot_zero))
    limits = EngineConfig(max_sequences=3, max_tokens_per_step=max_tokens_per_step)
    own = Engine(target, limits, PTPConfig(adapter=folder, model=str(tiny_model_dir("llama"))))
    serial = Engine(target, limits, PTPConfig(adapter=folder, mode="serial"))
    for ours, shared in zip(own.generate(REQUESTS), serial.generate(REQUESTS), strict=True):
        assert ours.token_ids == shared.token_ids
        assert ours.stats == shared.stats


@pytest.mark.parametrize(("samples", "asked", "expected"), [(1, None, 2), (2, None, 1), (5, None, 1), (5, 3, 3)])
def test_branches_fill_idle_rows_unless_a_job_says_how_many(
    target: LoadedModel, adapter_dir: Callable[..., Path], samples: int, asked: int | None, expected: int
) -> None:
    """Of 8 idle rows on a CPU, windows of 4 slots."""
    engine = engine_of(target, adapter_dir("llama", head="o"), mode="one_pass", branches=asked)
    assert engine.speculation is not None
    drafter = engine.speculation._drafter
    assert isinstance(drafter, PTPDrafter)
    contexts = [DraftContext(i, "", list(range(10)), 4, SAMPLING, (i, 7)) for i in range(samples)]
    chain = tuple((token, 0.6, drafter._buckets.of(token)[2]) for token in (1, 2, 3))
    drafter._guesses = {context.key: Guesses(10, (chain,)) for context in contexts}
    proposals = drafter.propose(contexts, [3] * samples, 0.0)
    assert [len(proposal.branches) for proposal in proposals] == [expected] * samples


def test_depths_are_ranked_by_their_probability() -> None:
    assert [depth for depth, _ in _likely_depths((0.7, 0.2), 2)] == [1, 0]
    assert [p for _, p in _likely_depths((0.7, 0.2), 3)] == pytest.approx([0.5, 0.3, 0.2])
    assert _likely_depths((), 3) == [(0, 1.0)]


def test_what_two_drafters_guess_is_one_node() -> None:
    chain = Draft.chain((2, 3), "ptp", (0.5, 0.1))
    tree = Draft((2, 4), (-1, 0), (0.6, 0.3), ("auto", "auto"))
    assert _merged(chain, tree) == Draft((2, 3, 4), (-1, 0, 0), (0.6, 0.1, 0.3), ("ptp", "ptp", "auto"))


@pytest.mark.parametrize(("head", "warns"), [("o", True), ("c", False)])
def test_another_temperature_is_warned_of_once(
    target: LoadedModel,
    adapter_dir: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
    head: Literal["o", "c"],
    warns: bool,
) -> None:
    metrics = {"correct": 3.0, "correct_shuffled": 1.25}
    folder = adapter_dir("llama", head=head, adapt={"temperature": 0.7}, metrics=metrics)
    with caplog.at_level(logging.WARNING):
        engine_of(target, folder).generate(REQUESTS)
    expected = (
        "the adapter was trained for temperature 0.7, and these samples are drawn with temperature 0.8: "
        "expect down to 1.25 correct drafts of 6 instead of 3.00"
    )
    assert caplog.messages == ([expected] if warns else [])


def test_an_adapter_of_another_model_is_refused(target: LoadedModel, adapter_dir: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"an adapter must be one for model\.id"):
        adapter_of(PTPConfig(adapter=str(adapter_dir("mistral", head="o"))), target)


def test_no_window_beyond_the_context(target: LoadedModel, adapter_dir: Callable[..., Path]) -> None:
    config = PTPConfig(adapter=str(adapter_dir("llama", head="c")), mode="serial")
    runner = ModelRunner(target.model, adapter=adapter_of(config, target))
    drafter = build_drafter(config, target, EngineConfig(), runner)
    assert drafter is not None
    context = DraftContext(0, "g", [1] * target.max_context, 1, SAMPLING)
    (proposal,) = drafter.propose([context], [4], 0.0)
    assert len(proposal.draft) == 0
