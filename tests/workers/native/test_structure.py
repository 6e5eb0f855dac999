"""Which models the kernels serve; all others fall back to their own modules, or are refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from pipeline.config import ModelConfig
from pipeline.errors import ConfigError
from workers.model_loading import load_model
from workers.model_runner import ModelRunner
from workers.native.build import NativeUnavailable, load_kernels

try:
    load_kernels()
except NativeUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def build(kind: str = "Llama", dtype: torch.dtype = torch.float32, **arguments: Any) -> PreTrainedModel:
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **arguments})
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def check_refused(model: PreTrainedModel, sentence: str) -> None:
    assert ModelRunner(model, "auto").native is None
    with pytest.raises(ConfigError, match=sentence) as caught:
        ModelRunner(model, "on")
    assert str(caught.value).startswith("engine.compile must be auto or off here, got on: ")
    assert "\n" not in str(caught.value)
    assert ModelRunner(model, "off").native is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["gpt_neox", "gemma2", "gemma3", "phi3", "llama", "qwen2", "qwen3", "mistral"])
def test_other_architectures_and_small_heads(family: str, dtype: str, tiny_model_dir: Callable[[str], Path]) -> None:
    model = load_model(ModelConfig(id=str(tiny_model_dir(family)), dtype=dtype)).model
    small = family in ("llama", "qwen2", "qwen3", "mistral")
    check_refused(model, "its head size is 8, not a multiple of 32" if small else "is not built like Llama: ")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_data_types(dtype: torch.dtype) -> None:
    check_refused(build(dtype=dtype), f"this CPU has no kernels for {dtype}")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"attention_bias": True}, "its output or feed-forward projections have biases"),
        ({"mlp_bias": True}, "its output or feed-forward projections have biases"),
        ({"hidden_act": "gelu"}, "its activation is GELUActivation"),
        ({"intermediate_size": 40}, r"its layer sizes \(64, 64, 32, 40\) are not all multiples of 16"),
        ({"head_dim": 48}, "its head size is 48, not a multiple of 32"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "of kind dynamic"),
    ],
)
def test_llamas_of_other_kinds(arguments: dict[str, Any], sentence: str) -> None:
    check_refused(build(**arguments), sentence)


def other_intermediate_size(model: Any) -> None:
    model.model.layers[1].mlp = type(model.model.layers[1].mlp)(build(intermediate_size=32).config)


def other_query_heads(model: Any) -> None:
    layer = build(num_attention_heads=4).model.layers[1].self_attn
    layer.layer_idx = 1
    model.model.layers[1].self_attn = layer


def short_head_norm(model: Any) -> None:
    model.model.layers[0].self_attn.q_norm = type(model.model.norm)(16, eps=model.model.norm.variance_epsilon)


def other_epsilon(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 1e-2


def more_parameters(model: Any) -> None:
    model.model.layers[0].self_attn.sinks = nn.Parameter(torch.zeros(2))


def more_modules(model: Any) -> None:
    model.model.layers[0].self_attn.value_norm = nn.Identity()


def norm_in_float64(model: Any) -> None:
    model.model.norm.double()


def head_with_a_bias(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.zeros(64))


def adapted_projection(model: Any) -> None:
    class Adapted(nn.Linear):
        pass

    old = model.model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = Adapted(old.in_features, old.out_features, bias=False)


CHANGES: list[tuple[Callable[[Any], None], str]] = [
    (other_intermediate_size, "its layers differ in shape: gate_proj, up_proj, down_proj"),
    (other_query_heads, "its layers differ in shape: q_proj, o_proj"),
    (short_head_norm, "its layers differ in shape: head norm"),
    (other_epsilon, "its norms differ in epsilon"),
    (more_parameters, "it has parameters of other kinds: model.layers.0.self_attn.sinks"),
    (more_modules, "its layers have value_norm"),
    (norm_in_float64, "its parameters differ in data type or device"),
    (head_with_a_bias, "its output head has a bias"),
    (adapted_projection, "some layers are not plain linear layers"),
]


@pytest.mark.parametrize(("change", "sentence"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
def test_changed_modules(change: Callable[[Any], None], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are read through bare pointers: what does not fit must be found before the first forward."""
    model = build()
    assert ModelRunner(model, "on").native is not None
    changed = build()
    runner = ModelRunner(changed, "off")
    probe = runner._probe()
    change(changed)
    monkeypatch.setattr(ModelRunner, "_probe", lambda self: probe)  # some of these cannot even run
    check_refused(changed, sentence)


def scaled_residual(monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    model: Any = build()
    mlp = type(model.model.layers[0].mlp)
    original = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: 1.5 * original(self, x))
    return model  # type: ignore[no-any-return]


def scaled_logits(_: pytest.MonkeyPatch) -> PreTrainedModel:
    """The angle between the logits is zero here."""
    return build(
        "Granite", logits_scaling=1.5, attention_multiplier=0.17, embedding_multiplier=1.0, residual_multiplier=1.0
    )


def unrotated_layer(_: pytest.MonkeyPatch) -> PreTrainedModel:
    return build("SmolLM3", no_rope_layers=[1, 0])


@pytest.mark.parametrize("make", [scaled_residual, scaled_logits, unrotated_layer])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_only_look_alike(
    make: Callable[[pytest.MonkeyPatch], PreTrainedModel], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_refused(make(monkeypatch).to(dtype), "its logits differ")


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3", "Granite", "SmolLM3"])
def test_served_kinds(kind: str) -> None:
    """Granite and SmolLM3 where their own ways are switched off."""
    arguments: dict[str, Any] = {"SmolLM3": {"no_rope_layers": [1, 1]}, "Granite": {"attention_multiplier": 0.2}}
    assert ModelRunner(build(kind, **arguments.get(kind, {})), "on").native is not None
