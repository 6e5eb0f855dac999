"""Ordinary language modelling: next-token cross entropy on packed sequences (see `trainer.Task`).

It makes the base models that experiments begin with, and the autoregressive arms that adapters are compared with.

Shape legend: B sequences, S columns, V vocabulary, N targets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from workers.ptp.sequences import Sequences
from workers.ptp.windows import PADDING, PackedTokens


class NextTokenTask:
    """A model, all of whose parameters are trained on every sampled token that has a context."""

    def __init__(self, model: PreTrainedModel, held_out: Sequences, evaluated_at_once: int) -> None:
        self.model = model
        self.device = model.device
        self._held_out, self._at_once = held_out, evaluated_at_once

    def parameters(self) -> Sequence[nn.Parameter]:
        return list(self.model.parameters())

    def loss(self, batch: Sequences, seeds: Sequence[int]) -> tuple[Tensor, int]:
        tokens = batch.tokens
        target_BS = next_targets(tokens)
        count = int((target_BS >= 0).sum())
        logits_BSV = self.model(
            input_ids=tokens.ids_BS,
            attention_mask=_document_mask(tokens, self.model.dtype),
            position_ids=tokens.position_BS,
            use_cache=False,
        ).logits
        loss = F.cross_entropy(logits_BSV.flatten(0, 1).float(), target_BS.flatten(), ignore_index=-1, reduction="sum")
        return loss, count

    def evaluate(self) -> Mapping[str, float]:
        """`loss`, `perplexity` and, where edges are stored, `reference_perplexity`: of what made the data."""
        loss_sum, count_sum, surprise = 0.0, 0, 0.0
        for start in range(0, len(self._held_out), self._at_once):
            part = self._held_out.rows(start, start + self._at_once).to(self.device)
            loss, count = self.loss(part, ())
            loss_sum, count_sum = loss_sum + loss.item(), count_sum + count
            if part.low_BS is not None and part.high_BS is not None:
                is_target_BS = part.tokens.sampled_BS & (part.tokens.position_BS > 0)
                surprise -= (part.high_BS - part.low_BS)[is_target_BS].log().sum().item()
        mean = loss_sum / max(count_sum, 1)
        figures = {"loss": mean, "perplexity": math.exp(mean)}
        if self._held_out.low_BS is not None:
            figures["reference_perplexity"] = math.exp(surprise / max(count_sum, 1))
        return figures


def next_targets(tokens: PackedTokens) -> Tensor:
    """The token `[B, S]` after each column, -1 where the next one is no target of the same document."""
    target_BS = torch.full_like(tokens.ids_BS, -1)
    follows_BS = (tokens.document_BS[:, 1:] == tokens.document_BS[:, :-1]) & (tokens.document_BS[:, 1:] != PADDING)
    is_target_BS = follows_BS & tokens.sampled_BS[:, 1:]
    target_BS[:, :-1] = torch.where(is_target_BS, tokens.ids_BS[:, 1:], -1)
    return target_BS


def _document_mask(tokens: PackedTokens, dtype: torch.dtype) -> Tensor | None:
    """Additive `[B, 1, S, S]`: causal within documents. None, which transformers takes as causal, for whole rows."""
    document_BS = tokens.document_BS
    if bool((document_BS == document_BS[:, :1]).all()):
        return None
    S = document_BS.shape[1]
    sees_BSS = document_BS[:, :, None] == document_BS[:, None]
    sees_BSS = sees_BSS & torch.ones(S, S, dtype=torch.bool, device=document_BS.device).tril()
    return torch.zeros(sees_BSS.shape, dtype=dtype, device=document_BS.device).masked_fill(~sees_BSS, -torch.inf)[
        :, None
    ]
