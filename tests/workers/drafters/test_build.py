from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from pipeline.config import EngineConfig, ModelConfig
from pipeline.decoding_config import (
    AutoConfig,
    AutoregressiveConfig,
    DecodingConfig,
    DraftModelConfig,
    JacobiConfig,
    LookaheadConfig,
    PromptLookupConfig,
    RecyclingConfig,
    SuffixConfig,
)
from workers.drafters.auto import AutoDrafter
from workers.drafters.base import Drafter
from workers.drafters.build import adapter_of, build_drafter
from workers.drafters.native_auto import NativeAutoDrafter
from workers.model_loading import LoadedModel, load_model
from workers.model_runner import ModelRunner
from workers.native import drafting
from workers.native.build import NativeUnavailable

CONFIGS: list[DecodingConfig] = [
    JacobiConfig(),
    JacobiConfig(init="random"),
    JacobiConfig(init="suffix"),
    LookaheadConfig(),
    LookaheadConfig(width=1, ngram=2, candidates=1),
    SuffixConfig(),
    SuffixConfig(max_match=1, use_finished=False),
    RecyclingConfig(),
    RecyclingConfig(top_k=1, context=1),
    AutoConfig(),
    AutoConfig(lookahead_width=3),
    PromptLookupConfig(),
    PromptLookupConfig(max_match=1, window=9),
    DraftModelConfig(model="llama"),
]


@pytest.fixture(scope="module")
def target(tiny_model_dir: Callable[[str], Path]) -> LoadedModel:
    return load_model(ModelConfig(id=str(tiny_model_dir("mistral"))))


@pytest.fixture
def build(target: LoadedModel, tiny_model_dir: Callable[[str], Path]) -> Callable[[DecodingConfig], Drafter | None]:
    def build_one(config: DecodingConfig) -> Drafter | None:
        if isinstance(config, DraftModelConfig):
            config = DraftModelConfig(model=str(tiny_model_dir(config.model)))
        runner = ModelRunner(target.model, adapter=adapter_of(config, target))
        return build_drafter(config, target, EngineConfig(), runner)

    return build_one


def test_auto_is_compiled_where_it_can_be(target: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ModelRunner(target.model)

    def drafter(compile_: Literal["auto", "off"], **config: int) -> Drafter | None:
        return build_drafter(AutoConfig(**config), target, EngineConfig(compile=compile_), runner)

    def unavailable() -> None:
        raise NativeUnavailable("there is no compiler")

    assert isinstance(drafter("off"), AutoDrafter)
    assert isinstance(drafter("auto", lookahead_width=3), AutoDrafter)
    if shutil.which("c++") is not None:
        assert isinstance(drafter("auto"), NativeAutoDrafter)
    monkeypatch.setattr(drafting, "library", unavailable)
    assert isinstance(drafter("auto"), AutoDrafter)


def test_plain_decoding_has_no_drafter(build: Any) -> None:
    assert build(AutoregressiveConfig()) is None


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_strategy_decodes_as_plain_decoding(config: DecodingConfig, build: Any, engine: Any, model: Any) -> None:
    drafter = build(config)
    assert drafter is not None
    assert drafter.name == config.strategy
    decoded = engine.decode(drafter, model, [5, 6, 7], max_tokens=60, max_rows=10)
    assert decoded.tokens == engine.plain(model, [5, 6, 7], 60)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_strategy_lives_with_windows_that_come_and_go(
    config: DecodingConfig, build: Any, engine: Any, model: Any
) -> None:
    """Samples of one prompt interleaved, with windows that change from step to step, none included."""
    drafter = build(config)
    assert drafter is not None
    contexts = [engine.context(model, [5, 6, 7], key=key) for key in range(3)]
    for context in contexts:
        drafter.start(context)
    for step in range(30):
        for context in contexts:
            engine.step(drafter, model, context, max_rows=(step * 7 + context.key) % 9, room=3 if step % 5 == 0 else 99)
    for context in contexts:
        assert context.tokens[3:] == engine.plain(model, [5, 6, 7], len(context.tokens) - 3)
        drafter.finish(context)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_strategy_lives_with_steps_that_go_by_unobserved(
    config: DecodingConfig, build: Any, engine: Any, model: Any
) -> None:
    """Stretches in which the engine asks for nothing and tells nothing, also right after the start and at the end."""
    drafter = build(config)
    assert drafter is not None
    context = engine.context(model, [5, 6, 7])
    drafter.start(context)
    for stretch in range(8):
        context.tokens += engine.plain(model, context.tokens, stretch % 4 * 3)
        for _ in range(4):
            engine.step(drafter, model, context, max_rows=6, room=99)
    assert context.tokens[3:] == engine.plain(model, [5, 6, 7], len(context.tokens) - 3)
    context.tokens += engine.plain(model, context.tokens, 5)
    drafter.finish(context)
