"""Norms with a gradient by hand against autograd over transformers' own modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from workers.ptp.rms_norm import epsilon_of, rms_norm


def norm_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    module = LlamaRMSNorm(24, eps=1e-3)
    module.weight.data = torch.randn(24)
    return module.to(dtype)


def test_only_plain_norms_are_recognised() -> None:
    assert epsilon_of(norm_of(torch.float64)) == 1e-3
    assert epsilon_of(Qwen3RMSNorm(8, eps=1e-5)) == 1e-5
    assert epsilon_of(norm_of(torch.bfloat16)) == 1e-3
    gemma = Gemma2RMSNorm(8, eps=1e-5)
    gemma.variance_epsilon = gemma.eps  # even under the other name
    for other in (gemma, nn.LayerNorm(8), nn.Linear(8, 8)):
        assert epsilon_of(other) is None


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_values_and_gradients_are_those_of_autograd(dtype: torch.dtype, tolerance: float) -> None:
    module = norm_of(dtype)
    x, grad = torch.randn(2, 5, 24).to(dtype), torch.randn(2, 5, 24).to(dtype)

    def differentiated(is_ours: bool) -> list[Tensor]:
        own = x.clone().requires_grad_()
        weight = module.get_parameter("weight")
        weight.grad = None
        y = rms_norm(own, weight, 1e-3, dtype) if is_ours else module(own)
        y.backward(grad)
        assert own.grad is not None
        assert weight.grad is not None
        return [y, own.grad, weight.grad]

    for found, expected in zip(differentiated(True), differentiated(False), strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
