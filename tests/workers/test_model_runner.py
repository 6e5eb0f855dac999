"""The packed step against the model's own attention under a dense mask, built here independently."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipeline.config import ModelConfig
from pipeline.errors import ConfigError
from workers.blocks import block_mask, decode_block, prompt_block
from workers.drafters.base import Draft, ExtraRows
from workers.kv_cache import KVCache, Slot
from workers.model_loading import load_model
from workers.model_runner import MAX_BATCHED_ROWS, ModelRunner

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_neox", "phi3"]
TREE = Draft((11, 12, 13), (-1, 0, 0), (0.8, 0.5, 0.2), ("test",) * 3)


def test_mask_of_the_worked_example() -> None:
    assert block_mask(TREE, None).astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]


def test_mask_with_extra_rows() -> None:
    """Extra rows see the pending token and each other, never the draft; the draft never sees them."""
    extra = ExtraRows((7, 8), (1, 2), np.array([[True, False], [True, True]]), (1,))
    assert block_mask(Draft((11,), (-1,), (0.5,), ("test",)), extra).astype(int).tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 0, 1, 0],
        [1, 0, 1, 1],
    ]


def test_decode_block_positions_and_sampled_rows() -> None:
    extra = ExtraRows((7, 8), (1, 2), np.array([[True, False], [True, True]]), (1,))
    block = decode_block(Slot(None, 0), 20, 9, TREE, extra)  # type: ignore[arg-type]
    assert block.tokens == (9, 11, 12, 13, 7, 8)
    assert block.positions == (20, 21, 22, 22, 21, 22)
    assert block.sampled == (0, 1, 2, 3, 5)


def dense_logits(model: PreTrainedModel, tokens: list[int], positions: list[int], sees: Tensor) -> Tensor:
    """Logits `[T, V]` with row r attending to the rows that `sees[r]` names; sliding layers also by distance."""
    position = torch.tensor(positions)

    def additive(visible: Tensor) -> Tensor:
        lowest = torch.finfo(model.dtype).min
        return torch.zeros(visible.shape, dtype=model.dtype).masked_fill(~visible, lowest)[None, None]

    masks: Tensor | dict[str, Tensor] = additive(sees)
    window = getattr(model.config, "sliding_window", None)
    if window is not None:
        near = additive(sees & (position[:, None] - position[None] < window))
        kinds = getattr(model.config, "layer_types", None)
        masks = {"full_attention": masks, "sliding_attention": near} if kinds else near
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        logits: Tensor = model(input_ids=ids, position_ids=position[None], attention_mask=masks, use_cache=False).logits
    return logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_step_equals_dense_attention(family: str, tiny_model_dir: Callable[[str], Path]) -> None:
    """Three sequences in one step: a prompt chunk, a tree, a tree with extra rows; their contexts were cached
    before.
    """
    folder = tiny_model_dir(family)
    backend = "eager" if family == "gemma2" else "sdpa"  # sdpa knows no softcap; eager has a float32 softmax
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation=backend).eval()
    runner = ModelRunner(load_model(ModelConfig(id=str(folder), dtype="float64")).model)
    cache = KVCache(runner.kv_shape, 2**30, max_slots=8)
    generator = torch.Generator().manual_seed(1)
    contexts = [torch.randint(5, 300, (length,), generator=generator).tolist() for length in (40, 23, 150)]
    slots = [slot for context in contexts if (slot := cache.allocate(len(context) + 40))]
    for context, slot in zip(contexts, slots, strict=True):
        runner.forward([prompt_block(slot, 0, tuple(context), sampled=False)])
        slot.used = len(context)
    extra = ExtraRows((7, 8), (1, 2), np.array([[True, False], [True, True]]), (0, 1))
    chunk = tuple(range(30, 30 + MAX_BATCHED_ROWS + 4))
    blocks = [
        prompt_block(slots[0], 40, chunk, sampled=True),
        decode_block(slots[1], 23, 9, TREE, None),
        decode_block(slots[2], 150, 9, TREE, extra),
    ]
    logits = runner.forward(blocks)
    expected = []
    for context, block in zip(contexts, blocks, strict=True):
        total = len(context) + block.num_rows
        sees = torch.ones(total, total, dtype=torch.bool).tril()
        if block.mask_RR is not None:
            sees[len(context) :, len(context) :] = torch.from_numpy(block.mask_RR)
        tokens, positions = [*context, *block.tokens], [*range(len(context)), *block.positions]
        rows = [len(context) + row for row in block.sampled]
        expected.append(dense_logits(reference, tokens, positions, sees)[rows])
    tolerance = 1e-4 if family == "gemma2" else 1e-6
    torch.testing.assert_close(logits, torch.cat(expected), rtol=tolerance, atol=tolerance)


def test_a_model_that_bypasses_the_attention_interface_is_refused(tiny_model_dir: Callable[[str], Path]) -> None:
    model = load_model(ModelConfig(id=str(tiny_model_dir("llama")))).model
    model.model.layers = model.model.layers[:1]
    broken = copy.deepcopy(model)
    with pytest.raises(ConfigError, match=r"whose 2 layers all do softmax attention .* got LlamaForCausalLM with 1"):
        ModelRunner(broken)
