"""Attention of slots against one dense masked attention, which knows nothing of windows, and autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.ptp.slot_attention import slot_attention

B, K, W, L, S, D = 2, 3, 4, 5, 7, 8


def dense(query: Tensor, key: Tensor, value: Tensor, context: tuple[Tensor, Tensor], sees_BWS: Tensor) -> Tensor:
    """All slots of a row as one sequence behind the context; another window's slots are masked."""
    window_M = torch.arange(W * L) // L
    own_MM = (window_M[:, None] == window_M) & torch.ones(W * L, W * L, dtype=torch.bool).tril()
    mask_BMC = torch.cat((sees_BWS.repeat_interleave(L, 1), own_MM.expand(B, -1, -1)), -1)
    keys, values = (torch.cat(pair, 2) for pair in ((context[0], key), (context[1], value)))
    groups = query.shape[2]
    return F.scaled_dot_product_attention(
        query.flatten(1, 2),
        keys.repeat_interleave(groups, 1),
        values.repeat_interleave(groups, 1),
        attn_mask=mask_BMC[:, None],
        scale=0.3,
    ).view(query.shape)


@pytest.mark.parametrize("groups", [1, 2])
def test_values_and_gradients_are_those_of_dense_attention(groups: int) -> None:
    torch.manual_seed(0)
    made = [torch.randn(B, K, *shape, dtype=torch.float64) for shape in ((groups, W * L, D), (W * L, D), (W * L, D))]
    context = (torch.randn(B, K, S, D, dtype=torch.float64), torch.randn(B, K, S, D, dtype=torch.float64))
    sees_BWS = torch.rand(B, W, S) < 0.5
    sees_BWS[0, 1] = False  # a window at the very start sees no context
    grad = torch.randn(B, K, groups, W * L, D, dtype=torch.float64)
    masks = (
        torch.zeros(B, W, 1, S, dtype=torch.float64).masked_fill_(~sees_BWS[:, :, None], -torch.inf),
        torch.full((L, L), -torch.inf, dtype=torch.float64).triu(1),
    )

    results = []
    for is_ours in (True, False):
        query, key, value = (x.clone().requires_grad_() for x in made)
        if is_ours:
            out = slot_attention(query, key, value, context, masks, 0.3)
        else:
            out = dense(query, key, value, context, sees_BWS)
        out.backward(grad)
        results.append([out, query.grad, key.grad, value.grad])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
