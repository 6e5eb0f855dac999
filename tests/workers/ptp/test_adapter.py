"""Adapters on disk, and adapters that belong to another model."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from pipeline.adapter_config import Variant, read_adapter_config, write_adapter_config
from pipeline.errors import ConfigError
from tests.workers.ptp.makers import load, make_adapter
from workers.ptp.adapter import load_adapter, start_from


@pytest.mark.parametrize("folder", ["local", "memory://adapters/x"])
@pytest.mark.parametrize("variant", ["lora", "full"])
@pytest.mark.parametrize("head", ["o", "c"])
def test_round_trip(
    variant: Variant, head: str, folder: str, tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    loaded = load(tiny_model_dir("qwen2"), "float32")
    adapter = make_adapter(loaded, variant=variant, head=head)
    folder = str(tmp_path / "made") if folder == "local" else f"{folder}-{variant}-{head}"
    trained = adapter.config.model_copy(update={"steps": 5, "metrics": {"correct": 3.0}})
    adapter.save(folder, trained)
    back = load_adapter(folder, load(tiny_model_dir("qwen2"), "float32"))
    assert back.config == trained
    assert not any(parameter.requires_grad for parameter in back.parameters())
    assert back.state().keys() == adapter.state().keys()
    assert all(torch.equal(tensor, back.state()[name]) for name, tensor in adapter.state().items())


def test_names_in_the_file(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    make_adapter(load(tiny_model_dir("llama"), "float32"), head="c").save(str(tmp_path))
    tensors = safetensors.torch.load_file(tmp_path / "adapter.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()}.items() >= {
        ("embedding.weight", (32, 32)),
        ("embedding.start", (32,)),
        ("lora.model.layers.1.mlp.down_proj.a", (4, 48)),
        ("lora.model.layers.1.mlp.down_proj.b", (32, 4)),
    }
    assert len(tensors) == 2 + 2 * 2 * 7


def test_serves_in_the_precision_of_the_base(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    make_adapter(load(tiny_model_dir("llama"), "float32")).save(str(tmp_path))
    back = load_adapter(str(tmp_path), load(tiny_model_dir("llama"), "float32"))
    assert {parameter.dtype for parameter in back.gated.trainable_parameters()} == {torch.float32}
    low = load(tiny_model_dir("llama"), "bfloat16")
    back = load_adapter(str(tmp_path), low)
    assert {tensor.dtype for tensor in back.gated.state().values()} == {torch.bfloat16}
    assert back.embedding.weight.dtype == torch.float32
    assert back.slot_inputs(torch.rand(2, 3), torch.tensor([5, 6])).dtype == torch.bfloat16


def test_slot_zero_decides_about_the_context_token(tiny_model_dir: Callable[[str], Path]) -> None:
    loaded = load(tiny_model_dir("llama"), "float32")
    u, token = torch.rand(2, 3), torch.tensor([5, 6])
    for slot_zero in ("plain", "context_token"):
        adapter = make_adapter(loaded, slot_zero=slot_zero)
        expected = adapter.embedding(u)
        if slot_zero == "context_token":
            expected[:, 0] += loaded.model.get_input_embeddings().weight[token]
        torch.testing.assert_close(adapter.slot_inputs(u, token), expected)


def test_an_untrained_categorical_slot_0_is_the_row_of_the_base(tiny_model_dir: Callable[[str], Path]) -> None:
    loaded = load(tiny_model_dir("llama"))
    tokens = torch.tensor([3, 200])
    for slot_zero, same in (("context_token", True), ("plain", False)):
        adapter = make_adapter(loaded, trained=False, head="c", slot_zero=slot_zero, variant="full")
        first_WE = adapter.slot_inputs(torch.full((2, 3), 0.3), tokens)[:, 0]
        assert torch.equal(first_WE, adapter.gated.embed(tokens)) is same


def test_seed_makes_the_weights(tiny_model_dir: Callable[[str], Path]) -> None:
    first, same, other = (
        make_adapter(load(tiny_model_dir("llama"), "float32"), trained=False, seed=seed) for seed in (1, 1, 2)
    )
    assert torch.equal(first.embedding.weight, same.embedding.weight)
    assert not torch.equal(first.embedding.weight, other.embedding.weight)
    assert first.config.seed == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"base_revision": "older"},
            "an adapter must be one for model.id {base} of revision {revision}, got {folder}, ",
        ),
        ({"vocabulary": 50257}, "an adapter must be one for model.id {base} (vocabulary 320), got {folder}, made for "),
        ({"layers": 3}, "(layers 2), got {folder}, made for {base} (layers 3)"),
        ({"hidden": 64}, "(hidden 32), got {folder}, made for {base} (hidden 64)"),
        ({"rank": 8}, "an adapter's weights must be what its adapter.json says, got "),
        ({"head": "c"}, "with embedding.start of shape None, not (32,)"),
    ],
)
def test_adapters_of_another_model_are_refused(
    change: dict[str, Any], sentence: str, tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    loaded = load(tiny_model_dir("llama"), "float32")
    make_adapter(loaded).save(str(tmp_path))
    config = read_adapter_config(str(tmp_path))
    shape = {key: value for key, value in change.items() if key in ("vocabulary", "hidden", "layers")}
    rest = {key: value for key, value in change.items() if key not in shape}
    rest["base_shape"] = config.base_shape.model_copy(update=shape)
    write_adapter_config(str(tmp_path), config.model_copy(update=rest))
    with pytest.raises(ConfigError) as refusal:
        load_adapter(str(tmp_path), loaded)
    expected = sentence.format(base=repr(loaded.name), revision=loaded.revision, folder=repr(str(tmp_path)))
    assert expected in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_copy_of_the_base_elsewhere_is_the_same_base(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    loaded = load(tiny_model_dir("llama"), "float32")
    make_adapter(loaded).save(str(tmp_path / "adapter"))
    shutil.copytree(tiny_model_dir("llama"), tmp_path / "copy")
    load_adapter(str(tmp_path / "adapter"), load(tmp_path / "copy", "float32"))
    with pytest.raises(ConfigError, match="revision"):
        load_adapter(str(tmp_path / "adapter"), replace(loaded, revision="another"))


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_broken_weights_are_refused(damage: str, tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    loaded = load(tiny_model_dir("llama"), "float32")
    make_adapter(loaded).save(str(tmp_path))
    weights = tmp_path / "adapter.safetensors"
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ConfigError, match="an adapter must have readable weights, got "):
        load_adapter(str(tmp_path), loaded)


def test_training_begins_with_another_adapter(tiny_model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    loaded = load(tiny_model_dir("llama"), "float32")
    earlier = make_adapter(loaded, slots=4)
    earlier.save(str(tmp_path), earlier.config.model_copy(update={"steps": 7}))
    new = make_adapter(load(tiny_model_dir("llama"), "float32"), trained=False, seed=9, slots=8)
    assert start_from(new, str(tmp_path), loaded).steps == 7
    assert new.config.slots == 8
    assert all(torch.equal(tensor, new.state()[name]) for name, tensor in earlier.state().items())
    assert all(parameter.requires_grad for parameter in new.trainable_parameters())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rank": 8}, "adapter.start must be an adapter with rank 8, got {folder} with 4"),
        ({"head": "c"}, "adapter.start must be an adapter with head c, got {folder} with o"),
        ({"scale": 2.0}, "adapter.start must be an adapter with scale 2.0, got {folder} with 0.5"),
    ],
)
def test_an_adapter_of_another_kind_is_no_beginning(
    change: dict[str, Any], sentence: str, tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    loaded = load(tiny_model_dir("llama"), "float32")
    make_adapter(loaded).save(str(tmp_path))
    new = make_adapter(load(tiny_model_dir("llama"), "float32"), **change)
    with pytest.raises(ConfigError, match=re.escape(sentence.format(folder=repr(str(tmp_path))))):
        start_from(new, str(tmp_path), loaded)
