"""The auxiliary weights of a parallel-token-prediction adapter, packed beside those of its base.

Shape legend: N outputs and M inner size of a linear layer, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from workers.native.decoder import LayerFields, ModelFields, NativeDecoder, PackedWeights, PatchFields
from workers.native.structure import LANES

_GROUPS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Linear layers that the kernels run as one, by the name of their patch."""
_INNER = 2 * LANES
"""Of which inner sizes are multiples that AMX tiles take."""


class NativeAdapter:
    """What `NativeDecoder.forward` needs for auxiliary rows: `fields`, which point into memory that this object owns.

    `state` names the adapter's tensors as its file does (`GatedModel.state`): `full.<parameter>` for trained copies,
    `lora.<module>.a` [R, M] and `.b` [N, R] for low-rank additions of `scale` b a.
    """

    def __init__(
        self, decoder: NativeDecoder, model: PreTrainedModel, state: Mapping[str, Tensor], scale: float
    ) -> None:
        self._weights = PackedWeights(model.dtype)
        copies = {
            model.get_parameter(name.removeprefix("full.")): copy
            for name, copy in state.items()
            if name.startswith("full.")
        }
        names = {module: name for name, module in model.named_modules()}
        layers = []
        for i, layer in enumerate(decoder.layers):
            base = decoder.fields.layer[i]
            fields = (
                self._weights.layer(layer, base.sliding_window, copies)
                if copies
                else LayerFields.from_buffer_copy(base)
            )
            for group, members in _GROUPS.items():
                paths = [f"lora.{names[layer]}.{member}" for member in members]
                outputs = [layer.get_submodule(member).out_features for member in members]
                setattr(fields, f"{group}_patch", self._patch(state, paths, outputs, scale))
            layers.append(fields)
        norm: Any = decoder.final_norm.weight
        self.fields = ModelFields.from_buffer_copy(decoder.fields)
        self.fields.adapted = (LayerFields * len(layers))(*layers)
        self.fields.adapted_norm = self._weights.keep(copies.get(norm, norm))

    def _patch(
        self, state: Mapping[str, Tensor], paths: Sequence[str], outputs: Sequence[int], scale: float
    ) -> PatchFields:
        """The low-rank additions of layers that run as one, inner and outer parts below each other."""
        if all(f"{path}.a" not in state for path in paths):
            return PatchFields()
        (rank,) = {len(state[f"{path}.a"]) for path in paths}
        missing = -rank % _INNER
        down_RM = torch.cat([F.pad(state[f"{path}.a"], (0, 0, 0, missing)) for path in paths])
        up_NR = torch.cat([F.pad(state[f"{path}.b"] * scale, (0, missing)) for path in paths])
        ends = tuple(accumulate(outputs))
        assert len(up_NR) == ends[-1], (up_NR.shape, outputs)
        down, up = self._weights.pack(down_RM), self._weights.pack(up_NR)
        return PatchFields(down, up, rank + missing, len(paths), ends)
