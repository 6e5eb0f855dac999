"""The engine's own rules: refusals, cancelling, figures. Equality of outputs is in tests/test_equivalence.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config import EngineConfig, ModelConfig, SamplingConfig
from pipeline.decoding_config import AutoConfig, AutoregressiveConfig, RecyclingConfig
from pipeline.errors import RowError
from workers.engine import Engine, Request
from workers.model_loading import LoadedModel, load_model


@pytest.fixture(scope="module")
def llama(tiny_model_dir: Callable[[str], Path]) -> LoadedModel:
    return load_model(ModelConfig(id=str(tiny_model_dir("llama")), dtype="float64"))


def test_refuses_what_leaves_no_room(llama: LoadedModel) -> None:
    engine = Engine(llama, EngineConfig(max_context=20), AutoConfig())
    with pytest.raises(RowError, match="the prompt must be shorter than the context of 20 tokens, got 20") as caught:
        engine.submit(Request("row", tuple(range(20)), SamplingConfig()))
    assert caught.value.error_type == "prompt_too_long"
    with pytest.raises(RowError, match="the prompt must have at least one token, got none"):
        engine.submit(Request("row", (), SamplingConfig()))
    engine.submit(Request("row", tuple(range(19)), SamplingConfig()))
    results = []
    while engine.has_work:
        results += engine.step()
    assert [(len(r.token_ids), r.finish_reason) for r in results] == [(1, "length")]


def test_refuses_what_can_never_fit_into_memory(llama: LoadedModel) -> None:
    engine = Engine(llama, EngineConfig(kv_memory_gb=1e-4), AutoregressiveConfig())
    with pytest.raises(RowError, match=r"must fit into the KV memory of 107374 bytes \(engine.kv_memory_gb\), got 300"):
        engine.submit(Request("row", tuple(range(300)), SamplingConfig(max_tokens=100)))
    assert not engine.has_work


def test_cancel_drops_all_samples_and_spares_others(llama: LoadedModel) -> None:
    engine = Engine(llama, EngineConfig(max_sequences=2), AutoConfig())
    engine.submit(Request("doomed", (5, 6, 7), SamplingConfig(n=3, ignore_eos=True)))
    engine.submit(Request("kept", (8, 9), SamplingConfig(max_tokens=5, ignore_eos=True)))
    for _ in range(4):
        engine.step()
    engine.cancel("doomed")
    finished = []
    while engine.has_work:
        finished += engine.step()
    assert [result.uid for result in finished] == ["kept"]


def test_pooled_stats_are_the_sum_of_the_samples(llama: LoadedModel) -> None:
    engine = Engine(llama, EngineConfig(), RecyclingConfig())
    requests = [Request(f"row-{i}", (5, 6, i), SamplingConfig(max_tokens=30, temperature=0)) for i in range(4)]
    results = engine.generate(requests)
    assert engine.completion_tokens == sum(len(result.token_ids) for result in results)
    assert engine.stats.num_steps == sum(result.stats.num_steps for result in results)
    assert engine.stats.num_accepted_draft_tokens > 0
    assert set(engine.stats.accepted_by_drafter) == {"recycling"}


def test_a_fixed_window_is_an_upper_bound(llama: LoadedModel) -> None:
    config = RecyclingConfig(min_window=3, max_window=3)
    (result,) = Engine(llama, EngineConfig(), config).generate([Request("row", (5, 6), SamplingConfig(max_tokens=40))])
    assert len(result.stats.window_histogram) <= 4
    assert result.stats.num_draft_tokens <= 3 * result.stats.num_steps


def test_two_engines_on_one_model(llama: LoadedModel) -> None:
    request = Request("row", (5, 6), SamplingConfig(max_tokens=10))
    first, second = (Engine(llama, EngineConfig(), AutoConfig()) for _ in range(2))
    assert first.generate([request])[0].token_ids == second.generate([request])[0].token_ids
