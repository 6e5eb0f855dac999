"""Linear layers with weights laid out once for the CPU's matrix kernels.

torch lays a bfloat16 weight out anew at every call, which takes longer than a product of few rows itself. Models that
the compiled kernels do not serve get this instead: about half as long in their linear layers, for no compile time.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)


class PackedLinear(nn.Module):
    """`nn.Linear` for inference: x [.., M] -> [.., N]. The unpacked weight is not kept."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        rows_RM = x.reshape(-1, self.in_features)
        y_RN = torch.ops.mkldnn._linear_pointwise(rows_RM, self.packed, self.bias, "none", [], "")
        return y_RN.view(*x.shape[:-1], self.out_features)  # type: ignore[no-any-return]


@torch.inference_mode()
def pack_linears(model: nn.Module) -> int:
    """Replace the plain bfloat16 linear layers of a model on a CPU; how many.

    The operators belong to torch's own compiler and may change, so each kind of layer is tried first, and one that does
    not compute what it should stays as it is.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return 0
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16 and child.weight.device.type == "cpu":
                packed = _packed(child)
                if packed is not None:
                    setattr(parent, name, packed)
                    replaced += 1
    return replaced


def _packed(linear: nn.Linear) -> PackedLinear | None:
    generator = torch.Generator().manual_seed(0)
    probe_RM = torch.randn(2, linear.in_features, generator=generator).to(torch.bfloat16)
    try:
        packed = PackedLinear(linear)
        same = torch.allclose(packed(probe_RM).float(), linear(probe_RM).float(), rtol=0.05, atol=0.05)
    except (AttributeError, RuntimeError, TypeError) as error:
        logger.info("linear layers stay as they are: %s", error)
        return None
    return packed if same else None
