"""Ragged attention over the KV cache, as an attention function of transformers.

A step is a concatenation of blocks, one per sequence: T rows in all, no padding outside attention. A row sees the
committed columns of its own sequence and the rows of its block that the block's mask names. The keys and values of the
step are first written behind the committed columns of each slot, then attention reads the slots in place:

- blocks of few rows (decoding) are padded to the longest of their slab and handled in one call per slab;
- blocks of many rows (prompt chunks, wide trees) get a call of their own.

Backend: `scaled_dot_product_attention`, on any device. The query heads of a key/value head are folded into its query
rows, so keys and values are never repeated. Models with logit softcapping use the same layout in plain operations. On
CUDA, models that flash attention can serve come with a layout of their own (`varlen_attention`).

Shape legend: T rows of the step, H query heads, K key/value heads, G = H/K, D head size, S slots of a slab, C columns,
R rows of a block (padded to the longest of its group), B blocks of a group, N rows of a group without padding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from workers.kv_cache import Slab
from workers.varlen_attention import VarlenLayout

ATTENTION_NAME = "sevenleague"
"""Not in transformers' mask registry, so models build no T x T mask of their own."""


@dataclass(slots=True)
class BlockGroup:
    """Blocks of one slab that are attended to in one call: slots [first_slot, first_slot + B) of the slab.

    `row_BR` are rows of the step (padding repeats row 0). The N rows that are no padding are `row_N`, found at
    `place_N` of the flattened [B * R]. `columns` bounds the columns that any row sees. `visible_BRC` and `distance_BRC`
    (query position minus key position) make masks.
    """

    slab: Slab
    first_slot: int
    columns: int
    row_BR: Tensor
    row_N: Tensor
    place_N: Tensor
    visible_BRC: Tensor
    distance_BRC: Tensor
    _masks: dict[int | None, Tensor] = field(default_factory=dict, init=False)

    def mask_B1QC(self, sliding_window: int | None, groups: int, dtype: torch.dtype) -> Tensor:
        """Additive mask of the folded query rows Q = R * G, made once per step and window size.

        A sliding window of w sees the w latest positions, the row's own included.
        """
        mask = self._masks.get(sliding_window)
        if mask is None:
            seen_BRC = self.visible_BRC
            if sliding_window is not None:
                seen_BRC = seen_BRC & (self.distance_BRC < sliding_window)
            mask_BRC = torch.zeros(seen_BRC.shape, dtype=dtype, device=seen_BRC.device)
            mask_BRC.masked_fill_(~seen_BRC, -torch.inf)
            mask = self._masks[sliding_window] = mask_BRC.repeat_interleave(groups, dim=1)[:, None]
        return mask


@dataclass(slots=True)
class StepLayout:
    """Where the rows of a step live.

    `writes` lists (slab, rows of the step or None for all, flat slot * C + column of each).
    """

    writes: list[tuple[Slab, Tensor | None, Tensor]]
    groups: list[BlockGroup]


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What one layer stores, and how it attends."""

    kv_heads: int
    key_size: int
    value_size: int
    scale: float
    sliding_window: int | None
    softcap: float | None


@dataclass(slots=True)
class AttentionProbe:
    """Takes the place of a `StepLayout` in one dry forward: notes what each layer does and attends to nothing."""

    layers: dict[int, AttentionLayer] = field(default_factory=dict)
    own_mask: bool = False
    """Some layer was given a mask that the model made itself, which says something that our masks do not know."""


def ragged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    step: StepLayout | VarlenLayout | AttentionProbe | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D].

    `step` arrives as a keyword argument of the model's forward. Positions are in the rotated queries and keys already.
    """
    assert step is not None, "this model was prepared for the sevenleague engine; call it through ModelRunner"
    query_THD, key_TKD, value_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(step, AttentionProbe):
        assert layer not in step.layers, f"layer {layer} attends twice"
        step.own_mask |= attention_mask is not None
        step.layers[layer] = AttentionLayer(key.shape[1], key.shape[3], value.shape[3], scale, sliding_window, softcap)
        return query_THD.new_zeros(1, *query_THD.shape), None
    if isinstance(step, VarlenLayout):
        return step.attend(layer, query_THD, key_TKD, value_TKD, scale)[None], None
    for slab, rows, columns in step.writes:
        keys_NKD, values_NKD = slab.kv_L2SCKD[layer].flatten(1, 2)
        keys_NKD.index_copy_(0, columns, key_TKD if rows is None else key_TKD[rows])
        values_NKD.index_copy_(0, columns, value_TKD if rows is None else value_TKD[rows])
    out_THD = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
    for group in step.groups:
        out_BRHD = _attend_group(group, layer, query_THD, scale, sliding_window, softcap)
        out_THD.index_copy_(0, group.row_N, out_BRHD.flatten(0, 1).index_select(0, group.place_N))
    return out_THD[None], None


def _attend_group(
    group: BlockGroup, layer: int, query_THD: Tensor, scale: float, sliding_window: int | None, softcap: float | None
) -> Tensor:
    B, R = group.row_BR.shape
    H, D = query_THD.shape[1:]
    last_slot = group.first_slot + B
    key_BKCD, value_BKCD = group.slab.kv_L2SCKD[layer, :, group.first_slot : last_slot, : group.columns].transpose(2, 3)
    K = key_BKCD.shape[1]
    G = H // K
    query_BRKGD = query_THD.index_select(0, group.row_BR.view(-1)).view(B, R, K, G, D)
    query_BKQD = query_BRKGD.transpose(1, 2).reshape(B, K, R * G, D)
    mask_B1QC = group.mask_B1QC(sliding_window, G, query_THD.dtype)
    if softcap is None:
        out_BKQD = F.scaled_dot_product_attention(query_BKQD, key_BKCD, value_BKCD, attn_mask=mask_B1QC, scale=scale)
    else:
        out_BKQD = softcapped_attention(query_BKQD, key_BKCD, value_BKCD, mask_B1QC, scale, softcap)
    return out_BKQD.view(B, K, R, G, D).transpose(1, 2).reshape(B, R, H, D)


def softcapped_attention(
    query_BKQD: Tensor, key_BKCD: Tensor, value_BKCD: Tensor, mask_B1QC: Tensor, scale: float, softcap: float
) -> Tensor:
    """softmax(softcap * tanh(q k^T * scale / softcap) + mask) v, with the softmax in float32 or wider (Gemma 2)."""
    logits_BKQC = (query_BKQD @ key_BKCD.transpose(-1, -2)) * scale
    logits_BKQC = torch.tanh(logits_BKQC / softcap) * softcap + mask_B1QC
    wide = torch.promote_types(logits_BKQC.dtype, torch.float32)
    return logits_BKQC.softmax(-1, dtype=wide).to(value_BKCD.dtype) @ value_BKCD


AttentionInterface.register(ATTENTION_NAME, ragged_attention)
