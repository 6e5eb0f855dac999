"""Figures of an adapter on held-out sequences, added up over the parts that fit into memory.

Shape legend: N windows in `*_NL`, slots that count in `*_N`; L slots, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.adapter_config import Head
from pipeline.errors import ConfigError
from workers.ptp import losses
from workers.ptp.evaluation import score


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Drafts, and sums over slots that count: of the loss, and of -log p under student, base and the data's teacher."""

    token_N: Tensor
    loss: float
    draft_NL: Tensor
    shuffled_NL: Tensor
    token_NL: Tensor
    counts_NL: Tensor
    surprise: float
    base_surprise: float
    teacher_surprise: float


def summary(parts: Sequence[HeldOut], head: Head) -> dict[str, float]:
    """The figures by name (see `AdapterTask.evaluate`). Raises ConfigError where no slot counts."""
    slots = sum(len(part.token_N) for part in parts)
    if not slots:
        raise ConfigError("data.held_out must leave tokens that the teacher's distribution holds, got none")
    token_NL = torch.cat([part.token_NL for part in parts])
    counts_NL = torch.cat([part.counts_NL for part in parts])
    scores = score(torch.cat([part.draft_NL for part in parts]), token_NL, counts_NL)
    shuffled_scores = score(torch.cat([part.shuffled_NL for part in parts]), token_NL, counts_NL)
    result = {
        "loss": sum(part.loss for part in parts) / slots,
        "correct": scores.correct,
        "accepted": scores.accepted,
        "correct_shuffled": shuffled_scores.correct,
        "reference_perplexity": math.exp(sum(part.base_surprise for part in parts) / slots),
        "teacher_perplexity": math.exp(sum(part.teacher_surprise for part in parts) / slots),
    }
    if head == "c":
        result["perplexity"] = math.exp(sum(part.surprise for part in parts) / slots)
    return result | {f"slot_{i}": p for i, p in enumerate(scores.slot) if p == p}


def surprise_of(logits_NV: Tensor, token_N: Tensor, temperature: float) -> float:
    """The sum of -log p over tokens, in nats."""
    return len(token_N) * losses.cross_entropy(logits_NV, token_N, temperature).item() if len(token_N) else 0.0
