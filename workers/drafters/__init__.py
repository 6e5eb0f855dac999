"""Drafters: ways of guessing the next tokens. Each is chosen by its section of the job file."""

from __future__ import annotations

from typing import assert_never

from pipeline.config import (
    AutoConfig,
    AutoregressiveConfig,
    DecodingConfig,
    JacobiConfig,
    LookaheadConfig,
    RecyclingConfig,
    SuffixConfig,
)
from workers.drafters.auto import AutoDrafter
from workers.drafters.base import Drafter
from workers.drafters.jacobi import JacobiDrafter
from workers.drafters.lookahead import LookaheadDrafter
from workers.drafters.recycling import RecyclingDrafter
from workers.drafters.suffix import SuffixDrafter


def build_drafter(config: DecodingConfig) -> Drafter | None:
    """The drafter of a decoding strategy; None for plain decoding."""
    match config:
        case AutoregressiveConfig():
            return None
        case JacobiConfig():
            return JacobiDrafter(config.init)
        case LookaheadConfig():
            return LookaheadDrafter(config.width, config.ngram, config.candidates)
        case SuffixConfig():
            return SuffixDrafter(config.max_match, config.use_finished)
        case RecyclingConfig():
            return RecyclingDrafter(config.top_k, config.context)
        case AutoConfig():
            return AutoDrafter()
        case _:
            assert_never(config)
