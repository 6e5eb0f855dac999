from __future__ import annotations

from typing import Any

import pytest

from pipeline.config import (
    AutoConfig,
    AutoregressiveConfig,
    DecodingConfig,
    JacobiConfig,
    LookaheadConfig,
    RecyclingConfig,
    SuffixConfig,
)
from workers.drafters import build_drafter

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
]


def test_plain_decoding_has_no_drafter() -> None:
    assert build_drafter(AutoregressiveConfig()) is None


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_strategy_decodes_as_plain_decoding(config: DecodingConfig, engine: Any, model: Any) -> None:
    drafter = build_drafter(config)
    assert drafter is not None
    assert drafter.name == config.strategy
    decoded = engine.decode(drafter, model, [5, 6, 7], max_tokens=60, max_rows=10)
    assert decoded.tokens == engine.plain(model, [5, 6, 7], 60)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_strategy_lives_with_windows_that_come_and_go(config: DecodingConfig, engine: Any, model: Any) -> None:
    """Samples of one prompt interleaved, with windows that change from step to step, none included."""
    drafter = build_drafter(config)
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
