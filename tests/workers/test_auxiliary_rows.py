"""Auxiliary rows of a step against the training forward of the same windows; ordinary rows stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.adapter_config import Head, SlotZero, Variant
from pipeline.config import ModelConfig
from workers.blocks import Block, decode_block, prompt_block, slot_block
from workers.drafters.base import Draft
from workers.kv_cache import KVCache
from workers.model_loading import load_model
from workers.model_runner import ModelRunner
from workers.ptp.adapter import Adapter, load_adapter
from workers.ptp.student import capture, slot_logits
from workers.ptp.windows import PackedTokens, make_windows

SLOTS = 4
CONTEXT = tuple(range(3, 24))
DRAFT = (31, 32, 33)
DEPTHS = (0, 1, 3)
VARIANTS: list[Variant] = ["lora", "full"]


def in_a_step(runner: ModelRunner, adapter: Adapter, u_WL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the pending token and its drafts without and with branches beside them, and those of the branches."""
    cache = KVCache(runner.kv_shape, 2**30, max_slots=4)
    other, slot = cache.allocate(40), cache.allocate(64)
    assert slot is not None
    assert other is not None
    runner.forward([prompt_block(other, 0, CONTEXT[::-1], sampled=True)])
    runner.forward([prompt_block(slot, 0, CONTEXT[:-1], sampled=True)])
    start = len(CONTEXT) - 1
    blocks = [
        decode_block(other, len(CONTEXT), 9, Draft(), None),
        decode_block(slot, start, CONTEXT[-1], Draft.chain(DRAFT, "test"), None),
    ]
    without = runner.forward(blocks)
    after = torch.tensor([(CONTEXT[-1], *DRAFT)[depth] for depth in DEPTHS])
    inputs_WLE = adapter.slot_inputs(u_WL, after)
    column = start + 1 + len(DRAFT)
    branches: list[Block] = []
    for depth, inputs_LE in zip(DEPTHS, inputs_WLE, strict=True):
        seen = start + 1 + depth - (adapter.config.slot_zero == "context_token")
        branches.append(slot_block(slot, column, seen, start + depth, inputs_LE, tuple(range(SLOTS))))
        column += SLOTS
    together = runner.forward(blocks + branches)
    return without, together[: len(without)], together[len(without) :]


def in_training(adapter: Adapter, u_WL: Tensor) -> Tensor:
    ids = torch.tensor([[*CONTEXT, *DRAFT, *range(SLOTS)]])
    tokens = PackedTokens(ids, torch.zeros_like(ids), torch.ones_like(ids).bool(), torch.zeros_like(ids).bool())
    windows = make_windows(tokens, len(CONTEXT) + torch.tensor([DEPTHS]), SLOTS)
    inputs_BWLE = adapter.slot_inputs(u_WL[None], windows.before(ids))
    with torch.inference_mode():
        return slot_logits(adapter, inputs_BWLE, windows, capture(adapter.gated, tokens))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("head", "slot_zero"), [("o", "context_token"), ("c", "plain")])
@pytest.mark.parametrize(
    ("family", "dtype", "compile"),
    [
        *((family, "float64", "auto") for family in ("llama", "qwen3", "gemma2", "gpt_neox", "mistral")),
        *((family, dtype, "on") for family in ("llama_native", "qwen2_native") for dtype in ("float32", "bfloat16")),
        *((family, "float32", "on") for family in ("qwen3_native", "mistral_native")),
    ],
)
def test_a_branch_is_the_window_that_was_trained(
    tiny_model_dir: Callable[[str], Path],
    adapter_dir: Callable[..., Path],
    family: str,
    dtype: str,
    compile: str,
    variant: Variant,
    head: Head,
    slot_zero: SlotZero,
) -> None:
    """Sliding windows, softcaps, biases, normed heads; through modules and compiled kernels."""
    loaded = load_model(ModelConfig(id=str(tiny_model_dir(family)), dtype=dtype))
    folder = adapter_dir(family, spread=0.2, variant=variant, head=head, slot_zero=slot_zero, slots=SLOTS)
    adapter = load_adapter(str(folder), loaded)
    runner = ModelRunner(loaded.model, compile, adapter)  # type: ignore[arg-type]
    u_WL = torch.rand(len(DEPTHS), SLOTS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    without, beside, branches = in_a_step(runner, adapter, u_WL)
    if compile == "on":  # these kernels compute each row apart from the others, libraries of matrix products do not
        assert torch.equal(without, beside)
    else:
        torch.testing.assert_close(without, beside, rtol=0, atol=1e-12)
    expected = in_training(adapter, u_WL)
    deviation = (branches.double() - expected.double()).norm(dim=1) / expected.double().norm(dim=1)
    if dtype == "bfloat16":  # a row of a wild model may differ much by rounding alone, but not every other row
        assert deviation.median() < 0.1
    else:
        assert deviation.max() < {"float64": 1e-9, "float32": 1e-4}[dtype]
