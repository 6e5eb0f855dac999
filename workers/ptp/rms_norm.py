"""RMS norms with a gradient made by hand, which takes half the time and a third of the memory of autograd's.

Norms and their gradients were the largest part of a training step of a small model on CPU.

Shape legend: R rows (any leading dimensions), E hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def epsilon_of(module: nn.Module) -> float | None:
    """The epsilon of a module that computes weight * x / sqrt(mean(x^2) + epsilon), by trial; None for any other.

    Names do not tell: Gemma's norm has a weight too, and multiplies by 1 + weight.
    """
    weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(epsilon, float):
        return None
    if [name for name, _ in module.named_parameters()] != ["weight"]:
        return None
    with torch.no_grad():
        x_RE = torch.linspace(-2.0, 3.0, 2 * len(weight), device=weight.device).view(2, -1).to(weight.dtype)
        expected_RE = weight.float() * x_RE.float() * (x_RE.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
        is_same = torch.allclose(module(x_RE).float(), expected_RE, rtol=2e-2, atol=1e-4)
    return epsilon if is_same else None


def rms_norm(x: Tensor, weight_E: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """x `[R, E]` normed, in `dtype`; computed in float32 (float64 for such x)."""
    normed: Tensor = _RMSNorm.apply(x, weight_E, epsilon, dtype)  # type: ignore[no-untyped-call]
    return normed


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
        x_wide = _wide(x)
        factor = (x_wide.square().mean(-1, keepdim=True) + epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, factor)
        return (x_wide * factor).mul_(weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, factor = ctx.saved_tensors
        grad = _wide(gradients[0])
        normed = _wide(x) * factor
        product = grad * normed
        grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype)
        mean = product.matmul(weight.to(product.dtype))[..., None] / x.shape[-1]
        grad_x = (grad * weight).addcmul_(normed, mean, value=-1.0).mul_(factor)
        return grad_x.to(x.dtype), grad_weight, None, None


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
