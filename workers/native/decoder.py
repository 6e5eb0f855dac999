"""A Llama-like decoder through the compiled kernels: weights packed once, one call per step.

Served are models whose layers are: RMS norm, grouped-query softmax attention with rotary positions (optionally with
normalised queries and keys, biased projections, a sliding window), RMS norm, SiLU-gated feed-forward. That is Llama,
Mistral, Qwen 2 and 3, and what is built like them. The structure is read from the modules; the caller compares a first
forward with the model's own, so that one which only looks alike is found out.

Shape legend: T rows of the step, E hidden, S sampled rows, V vocabulary, N outputs, M inner size, D head size,
P positions.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from workers.attention import AttentionProbe
from workers.blocks import Block
from workers.huge_pages import HugePages
from workers.native.build import NativeUnavailable, load_kernels
from workers.native.structure import INNER, LANES, PAIR, read_structure

POSITIONS_AT_ONCE = 1024
"""The rotary table grows by so many positions. Always so many, since a vectorised cosine may round by its place."""

ROW_ARRAYS = ("key_base", "layer_stride", "value_stride", "column", "contiguous", "position")


class PatchFields(Structure):
    _fields_ = [("down", c_void_p), ("up", c_void_p), ("rank", c_int64), ("members", c_int64), ("end", c_int64 * 3)]


class LayerFields(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("input_norm", "qkv", "qkv_bias", "query_norm", "key_norm")),
        *((name, c_void_p) for name in ("output", "post_norm", "gate_up", "down")),
        *((f"{name}_patch", PatchFields) for name in ("qkv", "output", "gate_up", "down")),
        ("sliding_window", c_int64),
    ]


class ModelFields(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("layers", "hidden", "heads", "kv_heads", "head_size", "intermediate")),
        ("vocabulary", c_int64),
        ("eps", c_float),
        ("scale", c_float),
        ("layer", POINTER(LayerFields)),
        ("adapted", POINTER(LayerFields)),
        ("final_norm", c_void_p),
        ("adapted_norm", c_void_p),
        ("head", c_void_p),
    ]


class _Step(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("rows", "first_auxiliary", "num_sampled", "threads")),
        *((name, c_void_p) for name in (*ROW_ARRAYS, "seen_begin", "seen", "sampled", "rotary")),
    ]


class NativeDecoder:
    """The packed weights of one model and the call that runs them. Raises NativeUnavailable for models not served."""

    def __init__(self, model: PreTrainedModel, probe: AttentionProbe) -> None:
        found = read_structure(model, probe)
        self._forward = _entry(model.dtype)
        self._weights = PackedWeights(model.dtype)
        self.dtype = model.dtype
        self.vocabulary: int = found.head.weight.shape[0]
        # As integers, since NumPy has no bfloat16. It gathers a step's rows sooner than torch has begun to.
        integers = torch.int16 if model.dtype.itemsize == 2 else torch.int32
        self.embedding_VE = found.embedding.weight.detach()
        self._integers_VE = self.embedding_VE.view(integers).numpy()
        self._rotary = found.rotary
        self._table_P2D = torch.empty(0, 2, found.head_size)
        self.layers = found.layers
        self.final_norm = found.norm
        fields = [
            self._weights.layer(layer, probe.layers[i].sliding_window, {}) for i, layer in enumerate(found.layers)
        ]
        self.fields = ModelFields(
            layers=len(found.layers),
            hidden=found.hidden,
            heads=found.heads,
            kv_heads=found.kv_heads,
            head_size=found.head_size,
            intermediate=found.intermediate,
            vocabulary=-(-self.vocabulary // LANES) * LANES,
            eps=found.eps,
            scale=found.scale,
            layer=(LayerFields * len(fields))(*fields),
            final_norm=self._weights.keep(found.norm.weight),
            head=self._weights.pack(found.head.weight),
        )

    @classmethod
    def of(cls, model: PreTrainedModel, probe: AttentionProbe) -> NativeDecoder:
        """The decoder of a model, packed once however many engines share the model."""
        if model not in _decoders:
            _decoders[model] = cls(model, probe)
        return _decoders[model]

    @staticmethod
    def forget(model: PreTrainedModel) -> None:
        """Free the packed weights of a model that is not to be served by them."""
        _decoders.pop(model, None)

    def forward(self, blocks: Sequence[Block], adapted: ModelFields | None = None) -> Tensor:
        """Logits `[S, V]` after the sampled rows of all blocks, in order; keys and values of all rows are stored.

        A row's logits do not depend on the other rows, bit for bit. Blocks of auxiliary rows come last; they need the
        fields of a model with an adapter (`NativeAdapter.fields`).
        """
        ordinary = [block for block in blocks if block.inputs_RE is None]
        ids_T = np.fromiter(chain.from_iterable([block.tokens for block in ordinary]), np.int64)
        hidden_TE = torch.from_numpy(self._integers_VE.take(ids_T, 0))  # as integers
        if len(ordinary) < len(blocks):
            assert adapted is not None, "auxiliary rows need an adapter"
            auxiliary = [block for block in blocks if block.inputs_RE is not None]
            inputs = [block.inputs_RE.to(self.dtype) for block in auxiliary if block.inputs_RE is not None]
            hidden_TE = torch.cat([hidden_TE.view(self.dtype), *inputs])
            ordinary += auxiliary
        arrays = step_arrays(ordinary)
        table_P2D = self._rotary_table(max(arrays["position"]) + 1)
        logits_SV = torch.empty(len(arrays["sampled"]), self.fields.vocabulary, dtype=self.dtype)
        addresses = [values.buffer_info()[0] for values in arrays.values()]
        sizes = (len(hidden_TE), len(ids_T), len(logits_SV), torch.get_num_threads())
        step = _Step(*sizes, *addresses, table_P2D.data_ptr())
        fields = self.fields if adapted is None else adapted
        self._forward(ctypes.byref(fields), ctypes.byref(step), hidden_TE.data_ptr(), logits_SV.data_ptr())
        return logits_SV if self.vocabulary == self.fields.vocabulary else logits_SV[:, : self.vocabulary]

    def _rotary_table(self, positions: int) -> Tensor:
        """Cosines and sines `[P, 2, D]` of at least so many positions, in float32, which the kernels rotate in."""
        table_P2D = self._table_P2D
        while len(table_P2D) < positions:
            position = torch.arange(len(table_P2D), len(table_P2D) + POSITIONS_AT_ONCE)[None]
            cos_1PD, sin_1PD = self._rotary(torch.empty(0), position)  # the empty tensor only tells the data type
            table_P2D = torch.cat([table_P2D, torch.stack([cos_1PD[0], sin_1PD[0]], dim=1)])
        self._table_P2D = table_P2D
        return table_P2D


class PackedWeights:
    """Owns what the structures point into."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._tensors: list[Tensor] = []
        self._pages = HugePages()

    def keep(self, tensor: Tensor) -> int:
        self._tensors.append(tensor.detach().to(self._dtype).contiguous())
        return self._tensors[-1].data_ptr()

    def pack(self, weight_NM: Tensor) -> int:
        return self.keep(self._pages.copy(packed(weight_NM.detach().to(self._dtype))))

    def layer(self, layer: Any, sliding_window: int | None, copies: Mapping[Tensor, Tensor]) -> LayerFields:
        """One layer's weights; `copies` take the place of the parameters that they are keyed by."""

        def own(parameter: Tensor) -> Tensor:
            return copies.get(parameter, parameter)

        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        biases = [own(p.bias) for p in projections if p.bias is not None]
        return LayerFields(
            input_norm=self.keep(own(layer.input_layernorm.weight)),
            qkv=self.pack(torch.cat([own(p.weight) for p in projections])),
            qkv_bias=self.keep(torch.cat(biases)) if biases else None,
            query_norm=self.keep(own(attention.q_norm.weight)) if hasattr(attention, "q_norm") else None,
            key_norm=self.keep(own(attention.k_norm.weight)) if hasattr(attention, "k_norm") else None,
            output=self.pack(own(attention.o_proj.weight)),
            post_norm=self.keep(own(layer.post_attention_layernorm.weight)),
            gate_up=self.pack(torch.cat([own(mlp.gate_proj.weight), own(mlp.up_proj.weight)])),
            down=self.pack(own(mlp.down_proj.weight)),
            sliding_window=sliding_window or 0,
        )


_decoders: WeakKeyDictionary[PreTrainedModel, NativeDecoder] = WeakKeyDictionary()


def _entry(dtype: torch.dtype) -> Any:
    """The library's function for a data type. Raises NativeUnavailable when the compiler did not know it."""
    name = f"forward_{str(dtype).removeprefix('torch.')}"
    entry = getattr(load_kernels(), name, None)
    if entry is None:
        raise NativeUnavailable(f"the C++ compiler is too old for {dtype} kernels on this CPU")
    entry.argtypes, entry.restype = [POINTER(ModelFields), POINTER(_Step), c_void_p, c_void_p], None
    return entry


def packed(weight_NM: Tensor) -> Tensor:
    """Pairs of panels of 16 outputs, `[N / 32, M / i, 2, 16, i]` with i = `INNER`; missing outputs of the last pair are
    zero.

    A core that reads a pair from its first byte to its last reads it much faster than two panels side by side.

    Worked example, float32, N = 17: one pair, its second panel with one row of weights and 15 of zeros.
    """
    weight_NM = weight_NM.detach()
    outputs, inner = weight_NM.shape
    side = INNER[weight_NM.dtype]
    weight_NM = F.pad(weight_NM, (0, 0, 0, -outputs % (PAIR * LANES)))
    return weight_NM.view(-1, PAIR, LANES, inner // side, side).permute(0, 3, 1, 2, 4).contiguous()


def step_arrays(blocks: Sequence[Block]) -> dict[str, array[int]]:
    """Where each row is stored and what it sees, as the kernels want it (`Step` in step.h, in the order of its fields).

    Without NumPy where it can be: a forward leaves nothing in the caches, so that each operation of a kind not done yet
    costs more than the rows of a step.

    Worked example, a draft tree (pending a, nodes b, c below a, d below b) behind 10 columns: columns 10..13,
    contiguous 10 for all, seen rows a: (a), b: (a, b), c: (a, c), d: (a, b, d). A chain needs no seen rows: a, b, c
    have contiguous 11, 12, 13.
    """
    arrays = {name: array("q") for name in (*ROW_ARRAYS, "seen_begin", "seen", "sampled")}
    key_base, layer_strides, value_strides, column, contiguous, position, seen_begin, seen, sampled = arrays.values()
    places: dict[int, tuple[int, int, int, int]] = {}  # asking a tensor costs more than all the rest of a block
    seen_begin.append(0)
    first_row = 0
    for block in blocks:
        slab = block.slot.slab
        place = places.get(id(slab))
        if place is None:
            kv = slab.kv_L2SCKD
            layer_stride, value_stride, slot_stride = kv.stride()[:3]
            place = places[id(slab)] = (kv.data_ptr(), slot_stride * kv.element_size(), layer_stride, value_stride)
        base, slot_bytes, layer_stride, value_stride = place
        rows, start = block.num_rows, block.start
        key_base.extend([base + block.slot.index * slot_bytes] * rows)
        layer_strides.extend([layer_stride] * rows)
        value_strides.extend([value_stride] * rows)
        column.extend(range(start, start + rows))
        position.extend(block.positions)
        sampled.extend([first_row + row for row in block.sampled])
        mask_RR = block.mask_RR
        if block.seen is not None:  # a window, whose rows do not follow the columns that they see
            contiguous.extend([block.seen] * rows)
            for row in range(first_row, first_row + rows):
                seen.extend(range(first_row, row + 1))
                seen_begin.append(len(seen))
        # A chain is causal too: nobody sees later rows, so as many pairs are all. Its rows attend together.
        elif mask_RR is None or np.count_nonzero(mask_RR) == rows * (rows + 1) // 2:
            contiguous.extend(range(start + 1, start + 1 + rows))
            seen_begin.extend([len(seen)] * rows)
        else:
            contiguous.extend([start] * rows)
            seen_begin.frombytes((len(seen) + mask_RR.sum(axis=1, dtype=np.int64).cumsum()).tobytes())
            seen.frombytes((first_row + mask_RR.nonzero()[1]).tobytes())
        first_row += rows
    return arrays
