"""A Llama-like decoder through the compiled kernels: weights packed once, one call per step.

Served are models whose layers are: RMS norm, grouped-query softmax attention with rotary positions (optionally with
normalised queries and keys, biased projections, a sliding window), RMS norm, SiLU-gated feed-forward. That is Llama,
Mistral, Qwen 2 and 3, and what is built like them. The structure is read from the modules; the caller compares a first
forward with the model's own, so that one which only looks alike is found out.

Shape legend: T rows of the step, E hidden, S sampled rows, V vocabulary, N outputs, M inner size, D head size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from workers.attention import AttentionProbe
from workers.blocks import Block
from workers.native.build import NativeUnavailable, cpu_features, load_kernels

LANES = 16
INNER = {torch.float32: 1, torch.bfloat16: 2}
"""Served data types, and how many inner-dimension values of a weight lie side by side."""

ROW_ARRAYS = ("key_base", "layer_stride", "value_stride", "column", "contiguous", "position")


class _Layer(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("input_norm", "qkv", "qkv_bias", "query_norm", "key_norm")),
        *((name, c_void_p) for name in ("output", "post_norm", "gate_up", "down")),
        ("sliding_window", c_int64),
    ]


class _Model(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("layers", "hidden", "heads", "kv_heads", "head_size", "intermediate")),
        ("vocabulary", c_int64),
        ("eps", c_float),
        ("scale", c_float),
        ("layer", POINTER(_Layer)),
        ("final_norm", c_void_p),
        ("head", c_void_p),
    ]


class _Step(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("rows", "num_sampled", "threads")),
        *((name, c_void_p) for name in (*ROW_ARRAYS, "seen_begin", "seen", "sampled", "cos", "sin")),
    ]


class NativeDecoder:
    """The packed weights of one model and the call that runs them. Raises NativeUnavailable for models not served."""

    def __init__(self, model: PreTrainedModel, probe: AttentionProbe) -> None:
        self._kernels = load_kernels()
        self._tensors: list[Tensor] = []  # what the structures below point into
        base: Any = model.base_model
        _check(model, base, probe)
        self.dtype = model.dtype
        self._embedding: Any = model.get_input_embeddings()
        head: Any = model.get_output_embeddings()
        self._rotary = base.rotary_emb
        self.vocabulary: int = head.weight.shape[0]
        layers = list(base.layers)
        self._layers = (_Layer * len(layers))(
            *(self._layer(layer, probe.layers[i].sliding_window) for i, layer in enumerate(layers))
        )
        attention = layers[0].self_attn
        self._model = _Model(
            layers=len(layers),
            hidden=self._embedding.embedding_dim,
            heads=attention.q_proj.out_features // attention.head_dim,
            kv_heads=attention.k_proj.out_features // attention.head_dim,
            head_size=attention.head_dim,
            intermediate=layers[0].mlp.down_proj.in_features,
            vocabulary=-(-self.vocabulary // LANES) * LANES,
            eps=layers[0].input_layernorm.variance_epsilon,
            scale=probe.layers[0].scale,
            layer=self._layers,
            final_norm=self._keep(base.norm.weight),
            head=self._pack(head.weight),
        )
        self._forward = getattr(self._kernels, f"forward_{str(self.dtype).removeprefix('torch.')}")

    @classmethod
    def of(cls, model: PreTrainedModel, probe: AttentionProbe) -> NativeDecoder:
        """The decoder of a model, packed once however many engines share the model."""
        if model not in _decoders:
            _decoders[model] = cls(model, probe)
        return _decoders[model]

    def forward(self, blocks: Sequence[Block]) -> Tensor:
        """Logits `[S, V]` after the sampled rows of all blocks, in order; keys and values of all rows are stored.

        A row's logits do not depend on the other rows, bit for bit.
        """
        ids_T = torch.tensor([token for block in blocks for token in block.tokens])
        hidden_TE = F.embedding(ids_T, self._embedding.weight)
        arrays = step_arrays(blocks)
        # In float32, which the kernels rotate in: the probe tensor only tells the data type.
        cos_TD, sin_TD = (
            x[0].contiguous() for x in self._rotary(torch.empty(0), torch.from_numpy(arrays["position"])[None])
        )
        logits_SV = torch.empty(len(arrays["sampled"]), self._model.vocabulary, dtype=self.dtype)
        step = _Step(
            rows=len(ids_T),
            num_sampled=len(arrays["sampled"]),
            threads=torch.get_num_threads(),
            cos=cos_TD.data_ptr(),
            sin=sin_TD.data_ptr(),
            **{name: array.ctypes.data for name, array in arrays.items()},
        )
        self._forward(
            ctypes.byref(self._model),
            ctypes.byref(step),
            c_void_p(hidden_TE.data_ptr()),
            c_void_p(logits_SV.data_ptr()),
        )
        return logits_SV[:, : self.vocabulary]

    def _layer(self, layer: Any, sliding_window: int | None) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        biases = [p.bias for p in projections if p.bias is not None]
        return _Layer(
            input_norm=self._keep(layer.input_layernorm.weight),
            qkv=self._pack(torch.cat([p.weight for p in projections])),
            qkv_bias=self._keep(torch.cat(biases)) if biases else None,
            query_norm=self._keep(attention.q_norm.weight) if hasattr(attention, "q_norm") else None,
            key_norm=self._keep(attention.k_norm.weight) if hasattr(attention, "k_norm") else None,
            output=self._pack(attention.o_proj.weight),
            post_norm=self._keep(layer.post_attention_layernorm.weight),
            gate_up=self._pack(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])),
            down=self._pack(mlp.down_proj.weight),
            sliding_window=sliding_window or 0,
        )

    def _pack(self, weight_NM: Tensor) -> int:
        return self._keep(packed(weight_NM))

    def _keep(self, tensor: Tensor) -> int:
        self._tensors.append(tensor.detach().contiguous())
        return self._tensors[-1].data_ptr()


_decoders: WeakKeyDictionary[PreTrainedModel, NativeDecoder] = WeakKeyDictionary()


def packed(weight_NM: Tensor) -> Tensor:
    """Panels of 16 outputs, `[N / 16, M / i, 16, i]` with i = `INNER`; missing outputs of the last panel are zero.

    Worked example, float32, N = 17: two panels, the second with one row of weights and 15 of zeros.
    """
    weight_NM = weight_NM.detach()
    outputs, inner = weight_NM.shape
    side = INNER[weight_NM.dtype]
    weight_NM = F.pad(weight_NM, (0, 0, 0, -outputs % LANES))
    return weight_NM.view(-1, LANES, inner // side, side).transpose(1, 2).contiguous()


def step_arrays(blocks: Sequence[Block]) -> dict[str, npt.NDArray[np.int64]]:
    """Where each row is stored and what it sees, as the kernels want it (`Step` in kernels.cpp).

    Worked example, a draft tree (pending a, nodes b, c below a, d below b) behind 10 columns: columns 10..13,
    contiguous 10 for all, seen rows a: (a), b: (a, b), c: (a, c), d: (a, b, d).
    """
    columns: dict[str, list[npt.NDArray[np.int64]]] = {name: [] for name in ROW_ARRAYS}
    seen_counts, seen, sampled = [], [], []
    first_row = 0
    for block in blocks:
        slot, rows = block.slot, block.num_rows
        kv = slot.slab.kv_L2SCKD
        key_base = kv.data_ptr() + slot.index * kv.stride(2) * kv.element_size()
        column = np.arange(block.start, block.start + rows)
        causal = block.mask_RR is None
        for name, value in (("key_base", key_base), ("layer_stride", kv.stride(0)), ("value_stride", kv.stride(1))):
            columns[name].append(np.full(rows, value))
        columns["column"].append(column)
        columns["contiguous"].append(column + 1 if causal else np.full(rows, block.start))
        columns["position"].append(np.array(block.positions))
        if block.mask_RR is None:
            seen_counts.append(np.zeros(rows, dtype=np.int64))
        else:
            row, seen_row = np.nonzero(block.mask_RR)
            seen_counts.append(np.bincount(row, minlength=rows))
            seen.append(seen_row + first_row)
        sampled += [first_row + row for row in block.sampled]
        first_row += rows
    arrays = {name: np.concatenate(parts) for name, parts in columns.items()}
    arrays["seen_begin"] = np.cumsum(np.concatenate([np.zeros(1, dtype=np.int64), *seen_counts]))
    arrays["seen"] = np.concatenate([np.zeros(0, dtype=np.int64), *seen])
    arrays["sampled"] = np.array(sampled, dtype=np.int64)
    return arrays


def _check(model: PreTrainedModel, base: Any, probe: AttentionProbe) -> None:
    """Raises NativeUnavailable, saying what the kernels do not know about this model."""
    dtype = model.dtype
    if dtype not in INNER or (dtype == torch.bfloat16 and "avx512_bf16" not in cpu_features()):
        raise NativeUnavailable(f"this CPU has no kernels for {dtype}")
    try:
        layers = list(base.layers)
        attentions, mlps = [layer.self_attn for layer in layers], [layer.mlp for layer in layers]
        norms = [
            base.norm,
            *(norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)),
        ]
        inputs = [projection for a in attentions for projection in (a.q_proj, a.k_proj, a.v_proj)]
        others = [*(a.o_proj for a in attentions), *(p for m in mlps for p in (m.gate_proj, m.up_proj, m.down_proj))]
        activations = {type(mlp.act_fn).__name__ for mlp in mlps}
        head_size = attentions[0].head_dim
        known = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
        unknown = {name for layer in layers for name, _ in layer.named_children()} - known
        eps = {norm.variance_epsilon for norm in norms}
        rotary, _ = base.rotary_emb(torch.empty(0), torch.zeros(1, 1, dtype=torch.int64))
    except AttributeError as error:
        raise NativeUnavailable(f"{type(model).__name__} is not built like Llama: {error}") from error
    sizes = {size for projection in (*inputs, *others) for size in projection.weight.shape}
    rules = (
        (not unknown, f"its layers have {sorted(unknown)}"),
        (activations <= {"SiLUActivation", "SiLU"}, f"its activation is {activations}"),
        (all(type(p) is nn.Linear for p in (*inputs, *others)), "its projections are not plain linear layers"),
        (all(p.bias is None for p in others), "its output or feed-forward projections have biases"),
        (len({p.bias is None for p in inputs}) == 1, "only some of its input projections have biases"),
        (len(eps) == 1, f"its norms differ in epsilon: {eps}"),
        (rotary.shape[-1] == head_size, "only a part of each head is rotated"),
        (head_size % (2 * LANES) == 0, f"its head size is {head_size}, not a multiple of 32"),
        (all(size % LANES == 0 for size in sizes), "its layer sizes are not multiples of 16"),
        (not any(layer.softcap for layer in probe.layers.values()), "it caps attention logits"),
        (len({layer.scale for layer in probe.layers.values()}) == 1, "its layers differ in attention scale"),
        (model.get_output_embeddings().bias is None, "its output head has a bias"),
    )
    for holds, sentence in rules:
        if not holds:
            raise NativeUnavailable(f"{type(model).__name__} is not built like Llama: {sentence}")
