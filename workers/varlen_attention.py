"""Ragged attention on CUDA: flash attention over the cached columns, merged with the block's own rows by log-sum-exp.

The rows of a step are ordered so that each part of it, the blocks of one slab and kind, is a slice. Slots are
contiguous, so `cu_k` (where a slot begins) and `used_k` (its valid columns) say what a block sees; block tables are not
needed, and where flash attention 2 splits a paged context over ragged queries its result is wrong
(pytorch/pytorch#194167). Kinds of parts:

- single: one row per block. It sees its whole slot up to itself: one call (which splits long contexts by itself).
- tree: few rows per block under any mask. One call, not causal, over the columns before the block; the rows of the
  block among themselves densely in float32; both merged. The query heads of a key/value head are folded into rows, so
  that each key is read once.
- causal: prompt chunks. One causal call over the slot; the kernel aligns the mask with the last row and column.

Shape legend: T rows of the step, N rows of a part, B blocks of a part, R rows of a block (padded), H query heads, K
key/value heads, G = H/K, D head size, C columns of the slab, all slots one after the other.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from workers.kv_cache import Slab
from workers.step_shape import OrderedStep, PartShape, StepShape


class FlashKernel(Protocol):
    """Attention of packed queries. Query i of block b, with n queries, sees columns `cu_k[b] + j` for j < `used_k[b]`;
    if causal, j <= i + used_k[b] - n. Returns the output [N, H, D] and the natural log-sum-exp of the scaled scores
    [H, N]; both are undefined for rows beyond `cu_q[-1]` and for blocks that see nothing.

    With max_q = 1, every block must have exactly one query. All index tensors are int32.
    """

    def __call__(
        self,
        query_NHD: Tensor,
        key_CKD: Tensor,
        value_CKD: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        used_k: Tensor,
        max_q: int,
        max_k: int,
        scale: float,
        *,
        causal: bool = False,
    ) -> tuple[Tensor, Tensor]: ...


def flash_attention(
    query_NHD: Tensor,
    key_CKD: Tensor,
    value_CKD: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    used_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    *,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """The `FlashKernel` of torch: `varlen_attn`, or in 2.11, where that lacks `seqused_k`, the operator behind it."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn  # here: it registers CUDA operators

    window = (-1, 0) if causal else (-1, -1)
    if "seqused_k" in inspect.signature(varlen_attn).parameters:
        out_NHD, lse_HN = varlen_attn(
            query_NHD,
            key_CKD,
            value_CKD,
            cu_q,
            cu_k,
            max_q,
            max_k,
            return_aux=AuxRequest(lse=True),
            scale=scale,
            window_size=window,
            enable_gqa=True,
            seqused_k=used_k,
        )
    else:
        out_NHD, lse_HN, *_ = torch.ops.aten._flash_attention_forward(
            query_NHD,
            key_CKD,
            value_CKD,
            cu_q,
            cu_k,
            max_q,
            max_k,
            0.0,
            causal,
            False,
            scale=scale,
            window_size_left=window[0],
            window_size_right=window[1],
            seqused_k=used_k,
        )
    return out_NHD, lse_HN


def refusal(dtype: torch.dtype, device: torch.device, head_size: int, *, full: bool) -> str | None:
    """Why flash attention cannot serve a model, in a few words; None when it can. `full`: its layers do full attention
    without softcap. A window could be kept for chains, but a tree's rows do not lie at their positions.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return "it is not on a CUDA device"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "its GPU is older than compute capability 8.0"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in {str(dtype).removeprefix('torch.')}"
    if head_size % 8 or head_size > 256:
        return f"its head size is {head_size}"
    return None if full else "some of its layers slide or cap"


@dataclass(slots=True)
class Part:
    """Blocks of one slab and kind: rows [first, first + shape.rows) of the step.

    `column_N` is where each row is written in the slab. Of a tree part, `row_BR` are rows of the part, `mask_BRR` says
    who sees whom, `place_N` finds a row in the flattened [B * R], and `prefix_N` says whether anything lies before its
    block.
    """

    shape: PartShape
    slab: Slab
    first: int
    column_N: Tensor
    cu_q: Tensor
    cu_k: Tensor
    used_k: Tensor
    row_BR: Tensor | None = None
    mask_BRR: Tensor | None = None
    place_N: Tensor | None = None
    prefix_N: Tensor | None = None
    _folded_cu_q: Tensor | None = None

    def attend(
        self, layer: int, kernel: FlashKernel, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scale: float
    ) -> Tensor:
        """Write keys and values of the part's rows, then attend: [N, H, D]."""
        keys_CKD, values_CKD = self.slab.kv_L2SCKD[layer].flatten(1, 2)
        keys_CKD.index_copy_(0, self.column_N, key_NKD)
        values_CKD.index_copy_(0, self.column_N, value_NKD)
        most_q, most_k = self.shape.block_rows, self.shape.capacity
        if self.shape.kind != "tree":
            causal = self.shape.kind == "causal"
            out_NHD, _ = kernel(
                query_NHD, keys_CKD, values_CKD, self.cu_q, self.cu_k, self.used_k, most_q, most_k, scale, causal=causal
            )
            return out_NHD
        K = keys_CKD.shape[1]
        G = query_NHD.shape[1] // K
        if self._folded_cu_q is None:  # once per step: layers have one G
            self._folded_cu_q = self.cu_q * G
        out, lse = kernel(
            folded(query_NHD, K),
            keys_CKD,
            values_CKD,
            self._folded_cu_q,
            self.cu_k,
            self.used_k,
            most_q * G,
            most_k,
            scale,
        )
        prefix_NHD, prefix_NH = unfolded(out, G), unfolded_lse(lse, G)
        own_NHD, own_NH = self._own_rows(query_NHD, key_NKD, value_NKD, scale)
        assert self.prefix_N is not None
        prefix_NHD = prefix_NHD.masked_fill(~self.prefix_N[:, None, None], 0.0)
        prefix_NH = prefix_NH.masked_fill(~self.prefix_N[:, None], -torch.inf)
        return merged(prefix_NHD, prefix_NH, own_NHD, own_NH).to(query_NHD.dtype)

    def _own_rows(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The rows of each block among themselves: output [N, H, D] and log-sum-exp [N, H], in float32 or wider."""
        assert self.row_BR is not None
        assert self.mask_BRR is not None
        assert self.place_N is not None
        B, R = self.row_BR.shape
        K, D = key_NKD.shape[1:]
        row = self.row_BR.view(-1)
        wide = torch.promote_types(query_NHD.dtype, torch.float32)
        query_BKGRD = query_NHD.index_select(0, row).to(wide).view(B, R, K, -1, D).permute(0, 2, 3, 1, 4)
        key_BK1DR = key_NKD.index_select(0, row).to(wide).view(B, R, K, 1, D).permute(0, 2, 3, 4, 1)
        value_BK1RD = value_NKD.index_select(0, row).to(wide).view(B, R, K, 1, D).permute(0, 2, 3, 1, 4)
        scores_BKGRR = (query_BKGRD @ key_BK1DR * scale).masked_fill(~self.mask_BRR[:, None, None], -torch.inf)
        out_BKGRD = scores_BKGRR.softmax(-1) @ value_BK1RD
        lse_BKGR = scores_BKGRR.logsumexp(-1)
        out_NHD = out_BKGRD.permute(0, 3, 1, 2, 4).reshape(B * R, -1, D).index_select(0, self.place_N)
        lse_NH = lse_BKGR.permute(0, 3, 1, 2).reshape(B * R, -1).index_select(0, self.place_N)
        return out_NHD, lse_NH


def folded(query_NHD: Tensor, K: int) -> Tensor:
    """The G query heads of a key/value head as rows: [N * G, K, D], row n * G + g."""
    N, H, D = query_NHD.shape
    return query_NHD.reshape(N, K, H // K, D).transpose(1, 2).reshape(N * (H // K), K, D)


def unfolded(out: Tensor, G: int) -> Tensor:
    """[N * G, K, D] -> [N, H, D]: undoes `folded`."""
    rows, K, D = out.shape
    return out.reshape(rows // G, G, K, D).transpose(1, 2).reshape(rows // G, K * G, D)


def unfolded_lse(lse: Tensor, G: int) -> Tensor:
    """[K, N * G] -> [N, H]."""
    K, rows = lse.shape
    return lse.reshape(K, rows // G, G).transpose(0, 1).reshape(rows // G, K * G)


def merged(a_NHD: Tensor, a_NH: Tensor, b_NHD: Tensor, b_NH: Tensor) -> Tensor:
    """Attention over the union of two sets of keys, from output and log-sum-exp over each.

    out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i). An empty set has lse -inf; one of the two must
    not be empty. Worked example: lse 0 and log 3 give out = a / 4 + 3 b / 4.
    """
    lse_NH = torch.logaddexp(a_NH, b_NH)
    return a_NHD * (a_NH - lse_NH).exp()[..., None] + b_NHD * (b_NH - lse_NH).exp()[..., None]


@dataclass(slots=True)
class VarlenLayout:
    """Where the rows of a step live and how they attend."""

    parts: list[Part]
    kernel: FlashKernel

    def attend(self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scale: float) -> Tensor:
        """Keys and values [T, K, D] are written to their slots; returns the attention output [T, H, D]."""
        outs = []
        for part in self.parts:
            rows = slice(part.first, part.first + part.shape.rows)
            outs.append(part.attend(layer, self.kernel, query_THD[rows], key_TKD[rows], value_TKD[rows], scale))
        return torch.cat(outs) if len(outs) > 1 else outs[0]


def varlen_layout(step: OrderedStep, shape: StepShape, arrays: dict[str, Tensor], kernel: FlashKernel) -> VarlenLayout:
    """The layout over `step_arrays(step, shape)` on the device. Slabs are those of the step."""
    parts = []
    first = 0
    for i, (blocks, part_shape) in enumerate(zip(step.parts, shape.parts, strict=True)):
        slab = blocks[0].slot.slab
        column_N, cu_q, cu_k, used_k = (arrays[f"{i}.{name}"] for name in ("column", "cu_q", "cu_k", "used_k"))
        tree = [arrays.get(f"{i}.{name}") for name in ("row", "mask", "place", "prefix")]
        parts.append(Part(part_shape, slab, first, column_N, cu_q, cu_k, used_k, *tree))
        first += part_shape.rows
    return VarlenLayout(parts, kernel)
