"""Which models the compiled kernels serve, told from their modules.

The kernels read weights through bare pointers, so everything that they assume about shapes and data types is checked
here. What modules do with their weights cannot be seen; `ModelRunner` compares a first forward for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workers.attention import AttentionProbe
from workers.native.build import NativeUnavailable, cpu_features

LANES, PAIR = 16, 2
"""Outputs of a panel of weights, and panels that lie side by side (lanes.h)."""

INNER = {torch.float32: 1, torch.bfloat16: 2}
"""Served data types, and how many inner-dimension values of a weight lie side by side."""

FIXED_ROPE = {"default", "linear", "llama3", "yarn"}
"""Kinds of rotary positions whose frequencies do not depend on the longest sequence of the step."""

PARTS = {
    "": {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}
"""All that a layer, its attention and its feed-forward may consist of."""


@dataclass(frozen=True, slots=True)
class Structure:
    """The modules of a served model and the sizes that all its layers share."""

    embedding: Any
    layers: list[Any]
    norm: Any
    head: Any
    rotary: Any
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    eps: float
    scale: float


def read_structure(model: PreTrainedModel, probe: AttentionProbe) -> Structure:
    """Raises NativeUnavailable with one sentence that says what the kernels do not know about this model."""
    dtype = model.dtype
    if dtype not in INNER or (dtype == torch.bfloat16 and "avx512_bf16" not in cpu_features()):
        raise NativeUnavailable(f"this CPU has no kernels for {dtype}")
    try:
        found = _read(model, probe)
        broken = [sentence for holds, sentence in _rules(model, probe, found) if not holds]
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        raise NativeUnavailable(f"{type(model).__name__} is not built like Llama: {error}") from error
    if broken:
        raise NativeUnavailable(f"{type(model).__name__} is not built like Llama: {broken[0]}")
    return found


def _read(model: PreTrainedModel, probe: AttentionProbe) -> Structure:
    base: Any = model.base_model
    first = base.layers[0]
    head_size = first.self_attn.head_dim
    return Structure(
        embedding=model.get_input_embeddings(),
        layers=list(base.layers),
        norm=base.norm,
        head=model.get_output_embeddings(),
        rotary=base.rotary_emb,
        hidden=first.self_attn.q_proj.in_features,
        heads=first.self_attn.q_proj.out_features // head_size,
        kv_heads=first.self_attn.k_proj.out_features // head_size,
        head_size=head_size,
        intermediate=first.mlp.down_proj.in_features,
        eps=first.input_layernorm.variance_epsilon,
        scale=probe.layers[0].scale,
    )


def _rules(model: PreTrainedModel, probe: AttentionProbe, found: Structure) -> list[tuple[bool, str]]:
    inputs = [getattr(layer.self_attn, name) for layer in found.layers for name in ("q_proj", "k_proj", "v_proj")]
    others = [layer.self_attn.o_proj for layer in found.layers]
    others += [getattr(layer.mlp, name) for layer in found.layers for name in ("gate_proj", "up_proj", "down_proj")]
    names = ("input_layernorm", "post_attention_layernorm")
    norms = [found.norm, *(getattr(layer, name) for layer in found.layers for name in names)]
    norms += [norm for layer in found.layers for norm in _head_norms(layer)]
    eps = {norm.variance_epsilon for norm in norms}
    used = {id(p) for m in (found.embedding, found.head, *inputs, *others, *norms) for p in m.parameters()}
    unused = [name for name, p in model.named_parameters() if id(p) not in used]
    odd_shapes = [name for name, tensor, shape in _shapes(found) if tuple(tensor.shape) != shape]
    kinds = {(p.dtype, p.device.type) for p in model.parameters()}
    activations = {type(layer.mlp.act_fn).__name__ for layer in found.layers}
    rotary, _ = found.rotary(torch.empty(0), torch.zeros(1, 1, dtype=torch.int64))
    sizes = (found.hidden, found.heads * found.head_size, found.kv_heads * found.head_size, found.intermediate)
    return [
        (not (extra := _unknown_parts(found)), f"its layers have {extra}"),
        (not unused, f"it has parameters of other kinds: {', '.join(unused[:3])}"),
        (kinds == {(model.dtype, "cpu")}, "its parameters differ in data type or device"),
        (activations <= {"SiLUActivation", "SiLU"}, f"its activation is {', '.join(sorted(activations))}"),
        (type(found.embedding) is nn.Embedding, "its embedding is not a plain lookup"),
        (all(type(p) is nn.Linear for p in (*inputs, *others, found.head)), "some layers are not plain linear layers"),
        (not odd_shapes, f"its layers differ in shape: {', '.join(odd_shapes[:3])}"),
        (found.heads % found.kv_heads == 0, "its query heads do not share key heads evenly"),
        (all(p.bias is None for p in others), "its output or feed-forward projections have biases"),
        (len({p.bias is None for p in inputs}) == 1, "only some of its input projections have biases"),
        (found.head.bias is None, "its output head has a bias"),
        (len(eps) == 1, f"its norms differ in epsilon: {sorted(eps)}"),
        (found.rotary.rope_type in FIXED_ROPE, f"its rotary positions are of kind {found.rotary.rope_type}"),
        (rotary.shape[-1] == found.head_size, "only a part of each head is rotated"),
        (found.head_size % (2 * LANES) == 0, f"its head size is {found.head_size}, not a multiple of 32"),
        (all(size % LANES == 0 for size in sizes), f"its layer sizes {sizes} are not all multiples of 16"),
        (not any(layer.softcap for layer in probe.layers.values()), "it caps attention logits"),
        (len({layer.scale for layer in probe.layers.values()}) == 1, "its layers differ in attention scale"),
    ]


def _head_norms(layer: Any) -> list[Any]:
    return [getattr(layer.self_attn, name) for name in ("q_norm", "k_norm") if hasattr(layer.self_attn, name)]


def _unknown_parts(found: Structure) -> str:
    names = {
        child
        for layer in found.layers
        for part, known in PARTS.items()
        for child, _ in layer.get_submodule(part).named_children()
        if child not in known
    }
    return ", ".join(sorted(names))


def _shapes(found: Structure) -> list[tuple[str, Tensor, tuple[int, ...]]]:
    """Name, tensor and expected shape of every weight but the embeddings' number of tokens."""
    hidden, intermediate = found.hidden, found.intermediate
    queries, keys = found.heads * found.head_size, found.kv_heads * found.head_size
    shapes: list[tuple[str, Tensor, tuple[int, ...]]] = [
        ("embedding", found.embedding.weight, (found.embedding.weight.shape[0], hidden)),
        ("head", found.head.weight, (found.head.weight.shape[0], hidden)),
        ("norm", found.norm.weight, (hidden,)),
    ]
    for layer in found.layers:
        attention, mlp = layer.self_attn, layer.mlp
        shapes += [
            ("input_layernorm", layer.input_layernorm.weight, (hidden,)),
            ("post_attention_layernorm", layer.post_attention_layernorm.weight, (hidden,)),
            ("q_proj", attention.q_proj.weight, (queries, hidden)),
            ("k_proj", attention.k_proj.weight, (keys, hidden)),
            ("v_proj", attention.v_proj.weight, (keys, hidden)),
            ("o_proj", attention.o_proj.weight, (hidden, queries)),
            ("gate_proj", mlp.gate_proj.weight, (intermediate, hidden)),
            ("up_proj", mlp.up_proj.weight, (intermediate, hidden)),
            ("down_proj", mlp.down_proj.weight, (hidden, intermediate)),
            *(("head norm", norm.weight, (found.head_size,)) for norm in _head_norms(layer)),
        ]
    return shapes
