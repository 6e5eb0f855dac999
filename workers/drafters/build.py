"""From a decoding strategy to its drafter."""

from __future__ import annotations

import logging
from typing import assert_never

from pipeline.config import EngineConfig
from pipeline.decoding_config import (
    BRANCHES,
    AutoConfig,
    AutoregressiveConfig,
    DecodingConfig,
    DraftModelConfig,
    JacobiConfig,
    LookaheadConfig,
    PromptLookupConfig,
    PTPConfig,
    RecyclingConfig,
    SuffixConfig,
)
from workers.adaptive_window import idle_rows_of
from workers.drafters.auto import AutoDrafter
from workers.drafters.base import Drafter
from workers.drafters.draft_cache import DraftCache
from workers.drafters.draft_model import DraftModelDrafter, load_draft_model
from workers.drafters.jacobi import JacobiDrafter
from workers.drafters.lookahead import LookaheadDrafter
from workers.drafters.merged import MergedDrafter
from workers.drafters.native_auto import NativeAutoDrafter
from workers.drafters.prompt_lookup import PromptLookupDrafter
from workers.drafters.ptp import PTPDrafter
from workers.drafters.recycling import RecyclingDrafter
from workers.drafters.suffix import SuffixDrafter
from workers.model_loading import LoadedModel
from workers.model_runner import ModelRunner
from workers.native.build import NativeUnavailable
from workers.ptp.adapter import Adapter, load_adapter

logger = logging.getLogger(__name__)


def adapter_of(config: DecodingConfig, target: LoadedModel) -> Adapter | None:
    """The adapter on the target itself that a strategy names. Raises ConfigError when it was made for another model."""
    if isinstance(config, AutoConfig) and config.adapter is not None:
        return load_adapter(config.adapter, target)
    if isinstance(config, PTPConfig) and config.model is None:
        return load_adapter(config.adapter, target)
    return None


def build_drafter(
    config: DecodingConfig, target: LoadedModel, engine: EngineConfig, runner: ModelRunner
) -> Drafter | None:
    """The drafter of a decoding strategy for one engine, whose target `runner` runs; None for plain decoding.

    Raises ConfigError when the strategy needs a draft model or an adapter that does not fit `target`.
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
        case PTPConfig():
            return _ptp(config, target, engine, runner)
        case AutoConfig():
            drafter = _auto(config, engine)
            if config.adapter is None:
                return drafter
            adapter = PTPConfig(adapter=config.adapter, mode="one_pass", branches=BRANCHES)
            return MergedDrafter(_ptp(adapter, target, engine, runner), drafter)
        case _:
            assert_never(config)


def _auto(config: AutoConfig, engine: EngineConfig) -> AutoDrafter | NativeAutoDrafter:
    """Compiled where it can be; both draft the same."""
    if engine.compile == "off" or config.lookahead_width:
        return AutoDrafter(config.lookahead_width)
    try:
        return NativeAutoDrafter()
    except NativeUnavailable as error:
        logger.info("drafts are made in Python instead of compiled code: %s", error)
        return AutoDrafter()


def _ptp(config: PTPConfig, target: LoadedModel, engine: EngineConfig, runner: ModelRunner) -> PTPDrafter:
    if config.model is not None:
        draft = load_draft_model(config.model, target)
        adapter = load_adapter(config.adapter, draft)
        own_runner = ModelRunner(draft.model, "off" if engine.compile == "off" else "auto", adapter)
        cache = DraftCache(draft, own_runner, engine)
        return PTPDrafter(adapter, own_runner, draft.max_context, own_cache=cache)
    assert runner.adapter is not None
    branches = (config.branches or BRANCHES) if config.is_one_pass else 0
    idle_rows = idle_rows_of(runner.device) if config.branches is None else None
    return PTPDrafter(runner.adapter, runner, target.max_context, branches=branches, idle_rows=idle_rows)
