"""The gated tree against the base and against plain models with merged weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from pipeline.adapter_config import Variant
from pipeline.errors import ConfigError
from tests.workers.ptp.makers import FAMILIES, load, make_adapter, merged, random_ids
from workers.ptp.gated import NO_AUXILIARY, GatedModel

VARIANTS: list[Variant] = ["lora", "full"]
ROWS, FIRST = 24, 15


def logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_ordinary_rows_are_the_base_bit_for_bit(
    family: str, variant: Variant, dtype: str, tiny_model_dir: Callable[[str], Path]
) -> None:
    loaded = load(tiny_model_dir(family), dtype)
    before = {name: parameter.clone() for name, parameter in loaded.model.named_parameters()}
    gated = make_adapter(loaded, variant=variant, dtype=loaded.model.dtype).gated
    ids = torch.tensor([random_ids(ROWS, 1)])
    expected = logits_of(loaded.model, ids)
    gated.first = FIRST
    mixed = logits_of(gated.tree, ids)
    assert torch.equal(mixed[:FIRST], expected[:FIRST])
    assert not torch.isclose(mixed[FIRST:], expected[FIRST:]).all(-1).any()
    gated.first = NO_AUXILIARY
    assert torch.equal(logits_of(gated.tree, ids), expected)
    assert all(torch.equal(parameter, before[name]) for name, parameter in loaded.model.named_parameters())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_auxiliary_rows_are_a_model_with_merged_weights(
    family: str, variant: Variant, tiny_model_dir: Callable[[str], Path]
) -> None:
    adapter = make_adapter(load(tiny_model_dir(family)), variant=variant)
    ids = torch.tensor([random_ids(ROWS, 1)])
    expected = logits_of(merged(tiny_model_dir(family), adapter), ids)
    tolerance = 1e-4  # some models' norms and eager attention compute in float32
    torch.testing.assert_close(logits_of(adapter.gated.tree, ids), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("variant", VARIANTS)
def test_untrained_adapter_changes_nothing(variant: Variant, tiny_model_dir: Callable[[str], Path]) -> None:
    loaded = load(tiny_model_dir("qwen3"))
    gated = make_adapter(loaded, variant=variant, trained=False).gated
    ids = torch.tensor([random_ids(ROWS, 1)])
    torch.testing.assert_close(logits_of(gated.tree, ids), logits_of(loaded.model, ids))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_tree_shares_the_base_weights(variant: Variant, tiny_model_dir: Callable[[str], Path]) -> None:
    loaded = load(tiny_model_dir("gemma3"))
    gated = make_adapter(loaded, variant=variant).gated
    own = {id(parameter) for parameter in gated.trainable_parameters()}
    shared = [parameter for parameter in gated.tree.parameters() if id(parameter) not in own]
    assert {id(parameter) for parameter in shared} == {id(parameter) for parameter in loaded.model.parameters()}
    assert not any(parameter.requires_grad for parameter in shared)
    assert gated.tree.config is not loaded.model.config
    assert not gated.train().tree.training


def test_full_copies_layers_and_final_norm_but_no_embedding(tiny_model_dir: Callable[[str], Path]) -> None:
    loaded = load(tiny_model_dir("gpt_neox"))
    names = set(make_adapter(loaded, variant="full").gated.state())
    base = {name for name, _ in loaded.model.named_parameters()}
    assert names == {f"full.{name}" for name in base if "embed" not in name and name != "lm_head.weight"}


def test_gemma_scales_its_embeddings_once(tiny_model_dir: Callable[[str], Path]) -> None:
    """`embed` gives what the layers get: as inputs_embeds it makes the logits of the ids."""
    gated = make_adapter(load(tiny_model_dir("gemma2"))).gated
    ids = torch.tensor([random_ids(ROWS, 1)])
    expected = logits_of(gated.tree, ids)
    with torch.inference_mode():
        logits = gated.tree(inputs_embeds=gated.embed(ids), use_cache=False).logits[0]
    assert torch.equal(logits, expected)
    raw = gated.tree.get_input_embeddings().weight.norm(dim=-1).mean().item()
    assert gated.embedding_norm() == pytest.approx(raw * 32**0.5, rel=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_models_that_cannot_be_gated_are_refused(variant: Variant) -> None:
    """GPT-2 has no position but in its embeddings, and no nn.Linear; a linear layer over heads sees no rows."""
    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2)
    gpt2 = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(ConfigError, match="an adapter's base must be a decoder of plain layers, got GPT2LMHeadModel"):
        GatedModel(gpt2, variant, 2, 1.0, torch.float32, generator)
