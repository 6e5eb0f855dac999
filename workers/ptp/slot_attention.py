"""Attention of slots over captured context and their own window under one softmax, with a gradient made by hand.

The context is nobody's parameter, so its keys and values need no gradient; and of all that autograd would keep of
B * W * L x S scores, one half-precision array is enough. That is half the time of the same in plain operations.

    scores   c = q K^T + mask (context), o = q k^T + causal (own window)
    weights  softmax over both, out = weights_c V + weights_o v

Shape legend: B rows, S columns, H query heads, K key/value heads, G = H / K, W windows of a row, L slots, D head size,
M = W * L.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def slot_attention(
    query_BKGMD: Tensor,
    key_BKMD: Tensor,
    value_BKMD: Tensor,
    context: tuple[Tensor, Tensor],
    masks: tuple[Tensor, Tensor],
    scale: float,
) -> Tensor:
    """Out `[B, K, G, M, D]`, with gradients of query, key and value of slots.

    `context` are keys and values `[B, K, S, D]`; `masks` are additive: `[B, W, L or 1, S]` and `[L, L]`. Every slot
    sees itself, so no row of scores is empty.
    """
    attended: Tensor = _SlotAttention.apply(  # type: ignore[no-untyped-call]
        query_BKGMD, key_BKMD, value_BKMD, *context, *masks, scale
    )
    return attended


class _SlotAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context_key: Tensor,
        context_value: Tensor,
        context_mask: Tensor,
        own_mask: Tensor,
        scale: float,
    ) -> Tensor:
        B, K, G, M, D = query.shape
        L = len(own_mask)
        W, S = M // L, context_key.shape[2]
        window = (B, K, G, W, L)
        window_key, window_value = key.view(B, K, 1, W, L, D), value.view(B, K, 1, W, L, D)
        scaled = query * scale
        seen = scaled.view(B, K, G * M, D) @ context_key.transpose(2, 3)
        scores = seen.new_empty(B, K, G * M, S + L)
        torch.add(seen.view(*window, S), context_mask[:, None, None], out=scores.view(*window, S + L)[..., :S])
        own = scaled.view(*window, D) @ window_key.transpose(-1, -2)
        torch.add(own, own_mask, out=scores.view(*window, S + L)[..., S:])
        weights = scores.softmax(-1)
        own_weights = weights[..., S:].contiguous()
        out = weights[..., :S] @ context_value
        out += (own_weights.view(*window, L) @ window_value).view(out.shape)
        ctx.save_for_backward(query, key, value, context_key, context_value, weights, own_weights, out)
        ctx.scale = scale
        return out.view(query.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, context_key, context_value, weights, own_weights, out = ctx.saved_tensors
        B, K, G, M, D = query.shape
        S, L = context_key.shape[2], own_weights.shape[-1]
        W = M // L
        window = (B, K, G, W, L)
        window_key, window_value = key.view(B, K, 1, W, L, D), value.view(B, K, 1, W, L, D)
        grad_out = gradients[0].reshape(B, K, G * M, D)
        wide = torch.promote_types(out.dtype, torch.float32)
        mean = (grad_out * out).sum(-1, keepdim=True, dtype=wide).to(out.dtype)
        grad_seen = (grad_out @ context_value.transpose(2, 3)).sub_(mean).mul_(weights[..., :S])
        grad_own = grad_out.view(*window, D) @ window_value.transpose(-1, -2)
        grad_own = grad_own.sub_(mean.view(*window, 1)).mul_(own_weights.view(*window, L))
        grad_query = (grad_seen @ context_key).view(*window, D).add_(grad_own @ window_key)

        def over_queries(weights: Tensor, vectors: Tensor) -> Tensor:
            """Sums over the G * L queries of a window."""
            weights, vectors = (x.view(*window, -1).transpose(2, 3).flatten(3, 4) for x in (weights, vectors))
            return (weights.transpose(-1, -2) @ vectors).view(key.shape)

        return (
            grad_query.mul_(ctx.scale).view(query.shape),
            over_queries(grad_own, query).mul_(ctx.scale),
            over_queries(own_weights, grad_out),
            *(None,) * 5,
        )
