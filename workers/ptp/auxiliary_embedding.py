"""What a slot is shown of the noise: u in [0, 1) as a vector of the model's size (arXiv 2512.21323, section 3).

Noise is first rounded to float32 and then down to 24 bits, which is what the engine draws (`workers.randomness`). A
training u may have finer bits, which no served u has and which would only be noise to the model.

Shape legend: W windows (or any leading dimensions), L slots, E hidden size, F features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.adapter_config import EmbeddingKind, Head

_BITS = 24
_GRID = 1 << _BITS
FEATURES: dict[EmbeddingKind, int] = {"arithmetic": 32, "bits32": 32, "threshold": 32, "linear": 2, "constant": 1}


def on_grid(u: Tensor) -> Tensor:
    """The multiple of 2^-24 at or below u, as the int64 numerator; u is rounded to float32 first and kept below 1."""
    return (u.float().double() * _GRID).long().clamp(0, _GRID - 1)


def features(u: Tensor, kind: EmbeddingKind) -> Tensor:
    """u `[..]` to float32 features `[.., F]`.

    - arithmetic: bit i = 1..32 is [u * 2^(i-1) mod 1 <= 1/2];
    - bits32: the IEEE-754 bits of float32 u, most significant first;
    - threshold: [u >= (i + 1/2) / 32] for i = 0..31;
    - linear: u and 1;
    - constant: 1, so that a linear map of it is one learned vector.

    Worked example: u = 0.3125 = 0.0101 in binary has arithmetic bits 1 (.3125), 0 (.625), 1 (.25), 1 (.5), 1 (0), 1, ..
    """
    number = on_grid(u)[..., None]
    index_F = torch.arange(FEATURES[kind], device=u.device)
    if kind == "arithmetic":
        shifted = (number << index_F.clamp(max=_BITS)) & (_GRID - 1)
        return (shifted <= _GRID // 2).float()
    if kind == "bits32":
        word = (number.float() / _GRID).view(torch.int32)
        return ((word >> (31 - index_F).int()) & 1).float()
    if kind == "threshold":
        return (number * 64 >= (2 * index_F + 1) * _GRID).float()
    if kind == "linear":
        return torch.cat((number.float() / _GRID, torch.ones_like(number, dtype=torch.float32)), -1)
    return torch.ones_like(number, dtype=torch.float32)


class AuxiliaryEmbedding(nn.Module):
    """E(u), a linear map of the features of u, and the inputs of slots made of it. Parameters are float32.

    `start_E` stands where head "c" has no noise to show: at slot 0.
    """

    def __init__(self, kind: EmbeddingKind, head: Head, hidden: int, norm: float, generator: torch.Generator) -> None:
        """`norm` is the mean length of the base's token embeddings, which E(u) has at first."""
        super().__init__()
        self.kind, self.head = kind, head
        weight_EF = torch.randn(hidden, FEATURES[kind], generator=generator)
        u_N = torch.rand(4096, generator=generator)
        first_norm = F.linear(features(u_N, kind), weight_EF).norm(dim=-1).mean()
        self.weight = nn.Parameter(weight_EF * (norm / first_norm))
        self.start: nn.Parameter | None = None
        if head == "c":
            self.start = nn.Parameter(F.normalize(torch.randn(hidden, generator=generator), dim=0) * norm)

    def forward(self, u: Tensor) -> Tensor:
        """u `[..]` to vectors `[.., E]`, in float32 under autocast too: bfloat16 would keep 8 bits of a linear u."""
        with torch.autocast(u.device.type, enabled=False):
            return F.linear(features(u, self.kind), self.weight)

    def slot_inputs(self, u_WL: Tensor, context_WE: Tensor | None) -> Tensor:
        """Inputs `[W, L, E]` of slots; `context_WE` (embeddings of the last context tokens) is added to slot 0.

        u_WL[w, l] picks the token that slot l predicts. Head "o" is shown it; head "c" is shown the one before:

            slot       0                       1             2
            head o     E(u_0) (+ context)      E(u_1)        E(u_2)
            head c     start (+ context)       E(u_0)        E(u_1)        (the last u is not used)
        """
        inputs_WLE: Tensor
        if self.start is None:
            inputs_WLE = self(u_WL)
        else:
            start_W1E = self.start.expand(*u_WL.shape[:-1], 1, -1)
            inputs_WLE = torch.cat((start_W1E, self(u_WL[..., :-1])), -2)
        if context_WE is None:
            return inputs_WLE
        first_W1E: Tensor = inputs_WLE[..., :1, :] + context_WE[..., None, :]
        return torch.cat((first_W1E, inputs_WLE[..., 1:, :]), -2)
