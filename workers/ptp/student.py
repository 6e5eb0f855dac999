"""Training forwards: the base's keys and values of packed rows once, then all slots of all windows in one pass.

Rows of a batch go through the model as one [1, B * S] forward, slots as one [1, B * W * L] forward, so that logits can
be asked for at any of them: the unembedding is the largest part, and slots that do not count need none.

Slot attention has two parts under one softmax: the context columns of the row (B*W*L x S), and the slots of the own
window (L x L per window). One dense mask over both would make W * L columns of which a slot sees at most L.

Shape legend: B rows, S columns, W windows, L slots, N asked rows or slots, H query heads, K key/value heads, G = H / K,
D head size, E hidden size, V vocabulary, T = B * S or B * W * L, M = W * L.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from workers.attention import softcapped_attention
from workers.ptp.adapter import Adapter
from workers.ptp.gated import NO_AUXILIARY, GatedModel, autocast_once
from workers.ptp.slot_attention import slot_attention
from workers.ptp.windows import PackedTokens, Windows, context_mask

TRAINING_ATTENTION = "sevenleague_training"
"""Not in transformers' mask registry, so models build no mask of their own."""


def _additive(sees: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, -torch.inf)


@dataclass(slots=True)
class _ContextLayout:
    """Attention of packed rows, which keeps what each layer's keys `[B, K, S, D]` and values are."""

    tokens: PackedTokens
    kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)
    _masks: dict[int | None, Tensor] = field(default_factory=dict, init=False)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        """query [H, T, D], key and value [K, T, D] -> [T, H, D]."""
        B = len(self.tokens.ids_BS)
        query_BHSD, key_BKSD, value_BKSD = (
            x.view(len(x), B, x.shape[1] // B, -1).transpose(0, 1) for x in (query, key, value)
        )
        self.kv[layer] = (key_BKSD, value_BKSD)
        mask_B1SS = self._mask(window, query.dtype)
        if cap is None:
            out_BHSD = F.scaled_dot_product_attention(
                query_BHSD, key_BKSD, value_BKSD, attn_mask=mask_B1SS, scale=scale, enable_gqa=True
            )
        else:
            groups = query_BHSD.shape[1] // key_BKSD.shape[1]
            key_BHSD, value_BHSD = (x.repeat_interleave(groups, dim=1) for x in (key_BKSD, value_BKSD))
            out_BHSD = softcapped_attention(query_BHSD, key_BHSD, value_BHSD, mask_B1SS, scale, cap)
        return out_BHSD.transpose(1, 2).flatten(0, 1)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        if window not in self._masks:
            document_BS = self.tokens.document_BS
            column_S = torch.arange(document_BS.shape[1], device=document_BS.device)
            distance_SS = column_S[:, None] - column_S
            near_SS = distance_SS >= 0 if window is None else (distance_SS >= 0) & (distance_SS < window)
            sees_BSS = near_SS & (document_BS[:, :, None] == document_BS[:, None])
            self._masks[window] = _additive(sees_BSS, dtype)[:, None]
        return self._masks[window]


@dataclass(slots=True)
class _SlotLayout:
    """Attention of slots over captured context and over their own window. `sees_BWS`: see `context_mask`."""

    kv: dict[int, tuple[Tensor, Tensor]]
    sees_BWS: Tensor
    position_BS: Tensor
    position_BWL: Tensor
    _masks: dict[int | None, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        """query [H, T, D], key and value [K, T, D] -> [T, H, D]."""
        B, W, L = self.position_BWL.shape
        context_key_BKSD, context_value_BKSD = (x.to(value.dtype) for x in self.kv[layer])
        K, S = context_key_BKSD.shape[1:3]
        G = query.shape[0] // K
        query_BKGMD = query.to(value.dtype).view(K, G, B, W * L, -1).permute(2, 0, 1, 3, 4)
        seen_BWLS, own_LL = self._mask(window, value.dtype)
        if cap is None:
            key_BKMD, value_BKMD = (x.view(K, B, W * L, -1).transpose(0, 1).contiguous() for x in (key, value))
            context = (context_key_BKSD, context_value_BKSD)
            out_BKGMD = slot_attention(
                query_BKGMD.contiguous(), key_BKMD, value_BKMD, context, (seen_BWLS, own_LL), scale
            )
            return out_BKGMD.permute(0, 3, 1, 2, 4).reshape(B * W * L, K * G, -1)
        key_BK1WLD, value_BK1WLD = (x.view(K, 1, B, W, L, -1).permute(2, 0, 1, 3, 4, 5) for x in (key, value))
        context_BKQS = query_BKGMD.flatten(2, 3) @ context_key_BKSD.transpose(2, 3)
        own_BKGWLL = query_BKGMD.reshape(B, K, G, W, L, -1) @ key_BK1WLD.to(value.dtype).transpose(-1, -2)
        logits = torch.cat((context_BKQS.view(B, K, G, W, L, S), own_BKGWLL), -1) * scale
        logits = torch.tanh(logits / cap) * cap
        mask_BWLC = torch.cat((seen_BWLS.expand(B, W, L, S), own_LL.expand(B, W, L, L)), -1)
        probs = (logits + mask_BWLC[:, None, None]).softmax(-1, torch.promote_types(logits.dtype, torch.float32))
        probs = probs.to(value.dtype)
        out_BKGMD = (probs[..., :S].reshape(B, K, G * W * L, S) @ context_value_BKSD).view(B, K, G, W * L, -1)
        out_BKGMD = out_BKGMD + (probs[..., S:] @ value_BK1WLD).flatten(3, 4)
        return out_BKGMD.permute(0, 3, 1, 2, 4).reshape(B * W * L, K * G, -1)

    def _mask(self, window: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if window not in self._masks:
            L = self.position_BWL.shape[2]
            sees_BWLS, own_LL = self.sees_BWS[:, :, None], torch.ones(L, L, dtype=torch.bool).tril()
            if window is not None:
                sees_BWLS = sees_BWLS & (self.position_BWL[..., None] - self.position_BS[:, None, None] < window)
                own_LL = own_LL.triu(1 - window)
            own_LL = own_LL.to(sees_BWLS.device)
            self._masks[window] = (_additive(sees_BWLS, dtype), _additive(own_LL, dtype))
        return self._masks[window]


def _training_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    step: _ContextLayout | _SlotLayout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]."""
    assert step is not None
    assert attention_mask is None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    dtype = value.dtype  # under autocast, rotation leaves queries and keys in float32
    query, key = query.to(dtype), key.to(dtype)
    return step.attend(layer, query[0], key[0], value[0], scale, sliding_window, softcap)[None], None


AttentionInterface.register(TRAINING_ATTENTION, _training_attention)


@dataclass(frozen=True, slots=True)
class Captured:
    """What slots see of packed rows: keys and values `[B, K, S, D]` of each layer. Also the logits asked for."""

    tokens: PackedTokens
    kv: dict[int, tuple[Tensor, Tensor]]
    logits_NV: Tensor


@torch.no_grad()
def capture(gated: GatedModel, tokens: PackedTokens, row_N: Tensor | None = None) -> Captured:
    """One forward of the base over packed rows. `row_N` (row * S + column) says where logits are wanted: none without.

    Logits at a column are those of the next one, as always.
    """
    layout = _ContextLayout(tokens)
    if row_N is None:
        row_N = torch.empty(0, dtype=torch.int64, device=tokens.ids_BS.device)
    gated.first = NO_AUXILIARY
    logits_NV = _forward(gated, tokens.position_BS, row_N, layout, gated.embed(tokens.ids_BS.reshape(1, -1)))
    gated.first = 0
    return Captured(tokens, layout.kv, logits_NV)


def slot_logits(
    adapter: Adapter, inputs_BWLE: Tensor, windows: Windows, captured: Captured, slot_N: Tensor | None = None
) -> Tensor:
    """Logits `[N, V]` of slots, with gradients of the adapted weights and the inputs.

    `slot_N` are flat indices of [B, W, L]; without it all slots: `logits_NV.view(B, W, L, -1)`. Under autocast to
    bfloat16 the adapted weights stay float32; over a bfloat16 base that is switched on here.
    """
    tokens = captured.tokens
    sees_BWS = context_mask(tokens, windows, adapter.config.slot_zero)
    layout = _SlotLayout(captured.kv, sees_BWS, tokens.position_BS, windows.position_BWL)
    if slot_N is None:
        slot_N = torch.arange(windows.position_BWL.numel(), device=inputs_BWLE.device)
    adapter.gated.first = 0
    inputs_1TE = inputs_BWLE.reshape(1, -1, inputs_BWLE.shape[-1])
    return _forward(adapter.gated, windows.position_BWL, slot_N, layout, inputs_1TE)


@torch.no_grad()
def continuation_logits(gated: GatedModel, token_BWL: Tensor, windows: Windows, captured: Captured) -> Tensor:
    """The base's logits `[B * W * L, V]` where windows hold other tokens than their rows do.

    Those of slot l are for target s + l, after the context and token_BWL[.., :l].
    """
    tokens = captured.tokens
    sees_BWS = context_mask(tokens, windows, "context_token")
    layout = _SlotLayout(captured.kv, sees_BWS, tokens.position_BS, windows.position_BWL)
    inputs_BWL = torch.cat((windows.before(tokens.ids_BS)[..., None], token_BWL[..., :-1]), -1)
    slot_N = torch.arange(inputs_BWL.numel(), device=inputs_BWL.device)
    gated.first = NO_AUXILIARY
    logits_NV = _forward(gated, windows.position_BWL, slot_N, layout, gated.embed(inputs_BWL.reshape(1, -1)))
    gated.first = 0
    return logits_NV


def _forward(
    gated: GatedModel, positions: Tensor, row_N: Tensor, layout: _ContextLayout | _SlotLayout, inputs_1TE: Tensor
) -> Tensor:
    """Logits `[N, V]` of rows. Under autocast the layers' input is narrowed already, or residuals stay wide."""
    tree = gated.tree
    if tree.config._attn_implementation != TRAINING_ATTENTION:
        tree.set_attn_implementation(TRAINING_ATTENTION)
    with _precision(gated):
        output = tree(
            inputs_embeds=autocast_once(inputs_1TE),
            position_ids=positions.reshape(1, -1),
            use_cache=False,
            logits_to_keep=row_N,
            step=layout,
        )
    return output.logits[0]  # type: ignore[no-any-return]


def _precision(gated: GatedModel) -> contextlib.AbstractContextManager[object]:
    """Autocast to the dtype of a bfloat16 base while adapted weights are float32; else what the caller set."""
    base = gated.tree.dtype
    if base != torch.bfloat16 or gated.trainable_parameters()[0].dtype == base:
        return contextlib.nullcontext()
    return torch.autocast(gated.tree.device.type, dtype=base)
