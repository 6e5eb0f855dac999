"""From a decoding strategy to its drafter."""

from __future__ import annotations

from typing import assert_never

from pipeline.config import (
    AutoConfig,
    AutoregressiveConfig,
    DecodingConfig,
    DraftModelConfig,
    EngineConfig,
    JacobiConfig,
    LookaheadConfig,
    PromptLookupConfig,
    RecyclingConfig,
    SuffixConfig,
)
from workers.drafters.auto import AutoDrafter
from workers.drafters.base import Drafter
from workers.drafters.draft_model import DraftModelDrafter, load_draft_model
from workers.drafters.jacobi import JacobiDrafter
from workers.drafters.lookahead import LookaheadDrafter
from workers.drafters.prompt_lookup import PromptLookupDrafter
from workers.drafters.recycling import RecyclingDrafter
from workers.drafters.suffix import SuffixDrafter
from workers.model_loading import LoadedModel


def build_drafter(config: DecodingConfig, target: LoadedModel, engine: EngineConfig) -> Drafter | None:
    """The drafter of a decoding strategy for one engine; None for plain decoding.

    Raises ConfigError when the strategy needs a draft model that does not fit `target`.
    """
    match config:
        case AutoregressiveConfig():
            return None
        case JacobiConfig():
            return JacobiDrafter(config.init)
        case LookaheadConfig():
            return LookaheadDrafter(config.width, config.ngram, config.candidates)
        case PromptLookupConfig():
            return PromptLookupDrafter(config.max_match)
        case DraftModelConfig():
            return DraftModelDrafter(load_draft_model(config.model, target), engine)
        case SuffixConfig():
            return SuffixDrafter(config.max_match, config.use_finished)
        case RecyclingConfig():
            return RecyclingDrafter(config.top_k, config.context)
        case AutoConfig():
            return AutoDrafter(config.lookahead_width)
        case _:
            assert_never(config)
