"""Which models are loaded, what is known of them then, and which are refused in which words."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pipeline.config import ModelConfig
from pipeline.errors import ConfigError
from workers.model_loading import LoadedModel, load_model, load_tokenizer

ModelDir = Callable[[str], Path]
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_neox", "phi3")


def load(folder: Path, **options: Any) -> LoadedModel:
    return load_model(ModelConfig(id=str(folder), **options))


def refusal(folder: Path, **options: Any) -> str:
    """The sentence in which a model is refused, with its folder as FOLDER."""
    with pytest.raises(ConfigError) as caught:
        load(folder, **options)
    return str(caught.value).replace(str(folder), "FOLDER")


@pytest.fixture
def copied(tiny_model_dir: ModelDir, tmp_path: Path) -> Path:
    """A copy of the tiny Llama that a test may change."""
    return Path(shutil.copytree(tiny_model_dir("llama"), tmp_path / "copied"))


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_as_transformers_loads_it(family: str, tiny_model_dir: ModelDir) -> None:
    loaded = load(tiny_model_dir(family))
    reference = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_dir(family)).eval()
    ids = torch.tensor([loaded.tokenizer("The quick brown fox", add_special_tokens=False).input_ids])
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, reference(ids).logits)
    assert not loaded.model.training
    assert loaded.name == str(tiny_model_dir(family))
    assert loaded.max_context == 512
    assert loaded.eos_token_ids == {loaded.tokenizer.eos_token_id}


def test_each_load_has_a_configuration_of_its_own(tiny_model_dir: ModelDir) -> None:
    first, second = load(tiny_model_dir("llama")), load(tiny_model_dir("llama"))
    first.model.set_attn_implementation("eager")
    assert first.model.config is not second.model.config
    assert second.model.config._attn_implementation != "eager"


@pytest.mark.parametrize(
    ("asked", "got"), [("auto", torch.float32), ("float64", torch.float64), ("bfloat16", torch.bfloat16)]
)
def test_dtype(asked: str, got: torch.dtype, tiny_model_dir: ModelDir) -> None:
    assert load(tiny_model_dir("llama"), dtype=asked).model.dtype == got


def test_device_argument_wins_over_the_config(tiny_model_dir: ModelDir) -> None:
    config = ModelConfig(id=str(tiny_model_dir("llama")), device="cuda")
    assert load_model(config, torch.device("cpu")).model.device.type == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_gpu_is_refused(tiny_model_dir: ModelDir) -> None:
    expected = "model.device must be cpu or auto on a worker without a CUDA device, got cuda"
    assert refusal(tiny_model_dir("llama"), device="cuda") == expected


def test_end_tokens_are_gathered_from_all_three_places(copied: Path) -> None:
    edit_json(copied / "generation_config.json", eos_token_id=[7, 8])
    edit_json(copied / "config.json", eos_token_id=9)
    assert load(copied).eos_token_ids == {7, 8, 9, 0}


def test_no_end_token_anywhere_is_fine(copied: Path) -> None:
    edit_json(copied / "generation_config.json", eos_token_id=None)
    edit_json(copied / "config.json", eos_token_id=None)
    edit_json(copied / "tokenizer_config.json", eos_token=None)
    assert load(copied).eos_token_ids == frozenset()


def test_longrope_context_ends_where_frequencies_would_change(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    shape = tiny(num_key_value_heads=2, original_max_position_embeddings=64)
    config = transformers.Phi3Config(**shape, pad_token_id=0, eos_token_id=0, rope_parameters=rope)
    assert config.max_position_embeddings == 512
    assert load(saved(config, tmp_path, tiny_tokenizer_dir)).max_context == 64


def test_yarn_context_is_the_configured_one(copied: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    edit_json(copied / "config.json", rope_parameters=rope)
    assert load(copied).max_context == 512


def test_revision_is_the_same_for_a_copy_and_another_for_other_weights(copied: Path, tiny_model_dir: ModelDir) -> None:
    original = load(tiny_model_dir("llama")).revision
    assert re.fullmatch("[0-9a-f]{16}", original)
    assert load(copied).revision == original
    weights = load_file(copied / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, copied / "model.safetensors", {"format": "pt"})
    assert load(copied).revision != original


def test_revision_of_a_hub_snapshot_is_its_commit(tiny_model_dir: ModelDir, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--some--model" / "snapshots" / "0123abcd"
    shutil.copytree(tiny_model_dir("llama"), snapshot)
    assert load(snapshot).revision == "0123abcd"


def test_tokenizer_alone_needs_no_weights(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    tokenizer = load_tokenizer(ModelConfig(id=str(copied)))
    text = "Any text, even ünïcödé 🙂,\n reads back."
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def tiny(**changes: Any) -> dict[str, Any]:
    """Arguments of a small configuration."""
    shape = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    return {**shape, "num_attention_heads": 4, "max_position_embeddings": 512, **changes}


def saved(config: transformers.PreTrainedConfig, folder: Path, tokenizer_dir: Path) -> Path:
    """A folder with a random model of this configuration, and the tiny tokenizer."""
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(folder)
    return folder


TEXT_MODEL = "model.id must be a decoder-only text model"


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (transformers.T5Config(), "without an encoder, got 'FOLDER' of type t5, an encoder-decoder"),
        (
            transformers.MambaConfig(num_hidden_layers=2),
            "with full or sliding-window attention only, got 'FOLDER' of type mamba with linear_attention",
        ),
        (
            transformers.Qwen3NextConfig(num_hidden_layers=4),
            "with full or sliding-window attention only, got 'FOLDER' of type qwen3_next with linear_attention",
        ),
        (
            transformers.Llama4TextConfig(num_hidden_layers=4),
            "with full or sliding-window attention only, got 'FOLDER' of type llama4_text with chunked_attention",
        ),
        (
            transformers.Gemma3Config(),
            "without other inputs, got 'FOLDER' of type gemma3, which wraps a text model",
        ),
        (
            transformers.Gemma3nTextConfig(),
            "with keys and values in each layer, got 'FOLDER' of type gemma3n_text, whose last layers share them",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_refused_by_configuration_before_weights_are_read(
    config: transformers.PreTrainedConfig, sentence: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    assert refusal(tmp_path) == f"{TEXT_MODEL} {sentence}"


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            transformers.GptOssConfig(**tiny(num_key_value_heads=2, head_dim=8, num_local_experts=2)),
            "without attention sinks, got 'FOLDER' of class GptOssForCausalLM",
        ),
        (
            transformers.BloomConfig(vocab_size=320, hidden_size=32, n_layer=2, n_head=4),
            "whose attention goes through transformers' AttentionInterface, got 'FOLDER' of class BloomForCausalLM",
        ),
        (
            transformers.BertConfig(**tiny()),
            "with causal attention, got 'FOLDER' of class BertLMHeadModel, which also looks ahead",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_refused_by_the_attention_of_the_loaded_model(
    config: transformers.PreTrainedConfig, sentence: str, tmp_path: Path, tiny_tokenizer_dir: Path
) -> None:
    assert refusal(saved(config, tmp_path, tiny_tokenizer_dir)) == f"{TEXT_MODEL} {sentence}"


def test_missing_tensor_is_refused(copied: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, copied / "model.safetensors", {"format": "pt"})
    assert refusal(copied) == "model.id must have all its weights, got 'FOLDER' without model.norm.weight"


def test_pickled_weights_are_read_only_when_asked_for(copied: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    torch.save(weights, copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    assert refusal(copied) == (
        "model.id must be a model with safetensors weights unless model.allow_pickle is true, got 'FOLDER' without any"
    )
    loaded = load(copied, allow_pickle=True)
    assert torch.equal(loaded.model.state_dict()["model.norm.weight"], weights["model.norm.weight"])
    torch.save({**weights, "model.norm.weight": weights["model.norm.weight"] + 1}, copied / "pytorch_model.bin")
    assert load(copied, allow_pickle=True).revision != loaded.revision


def test_a_pickle_that_would_run_something_is_refused_even_then(copied: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (copied / "ran",)

    torch.save({"model.norm.weight": Evil()}, copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    sentence = "model.id must be a model whose pickled weights hold nothing but tensors, got 'FOLDER'"
    assert refusal(copied, allow_pickle=True) == sentence
    assert not (copied / "ran").exists()


def test_a_configuration_cannot_name_a_pickle(copied: Path) -> None:
    torch.save({}, copied / "adapter_model.bin")
    edit_json(copied / "config.json", transformers_weights="adapter_model.bin")
    assert "whose weights are in a pickle of an adapter" in refusal(copied)


@pytest.mark.parametrize(
    ("config_json", "reason"),
    [
        ("{ broken", "It looks like the config file at"),
        ('{"model_type": "no_such_type"}', "The checkpoint you are trying to load has model type `no_such_type`"),
    ],
)
def test_unreadable_configuration_is_refused_in_one_line(copied: Path, config_json: str, reason: str) -> None:
    (copied / "config.json").write_text(config_json)
    sentence = refusal(copied)
    assert sentence.startswith(f"model.id must be one that transformers can load here, got 'FOLDER': {reason}")
    assert "\n" not in sentence


def test_code_beside_the_model_is_not_run_unless_trusted(copied: Path) -> None:
    (copied / "evil.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    edit_json(copied / "config.json", model_type="own", auto_map={"AutoConfig": "evil.Config"})
    assert "contains custom code" in refusal(copied)
    assert not list(copied.glob("**/ran"))
