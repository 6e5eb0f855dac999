"""Flash attention's part of CUDA decoding on the CPU: a plain kernel in its place, dense attention as the judge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from pipeline.config import ModelConfig
from tests.workers.flash_reference import reference_flash
from workers.blocks import Block, decode_block, prompt_block
from workers.device_arrays import DeviceArrays
from workers.drafters.base import EMPTY_PROPOSAL, Draft, ExtraRows
from workers.kv_cache import KVCache
from workers.kv_storage import KVShape
from workers.model_loading import load_model
from workers.model_runner import ModelRunner
from workers.step_shape import (
    MAX_TREE_ROWS,
    PartShape,
    StepShape,
    ordered,
    scratch_column,
    step_arrays,
)
from workers.varlen_attention import flash_attention, folded, merged, refusal, unfolded, unfolded_lse
from workers.varlen_steps import VarlenSteps

TREE = Draft((11, 12, 13), (-1, 0, 0), (0.8, 0.5, 0.2), ("test",) * 3)
CHAIN = Draft((11, 12), (-1, 0), (0.8, 0.5), ("test",) * 2)
EXTRA = ExtraRows((7, 8), (1, 2), np.array([[True, False], [True, True]]), (0, 1))
FULL_ATTENTION = ["llama", "qwen2", "qwen3", "gpt_neox", "phi3"]


def some_cache(max_slots: int = 8) -> KVCache:
    return KVCache(KVShape(2, 2, 8, torch.float64, torch.device("cpu")), 2**30, max_slots)


@pytest.mark.parametrize("causal", [False, True])
def test_the_stand_in_kernel_equals_attention_block_by_block(causal: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    query_NHD = torch.randn(7, 6, 8, generator=generator, dtype=torch.float64)
    key_CKD, value_CKD = torch.randn(2, 3 * 16, 3, 8, generator=generator, dtype=torch.float64)
    counts, slots, used = (3, 0, 1, 2), (2, 0, 0, 1), (5, 9, 16, 2)
    cu_q = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
    cu_k = torch.tensor([*(16 * slot for slot in slots), 0], dtype=torch.int32)
    used_k = torch.tensor(used, dtype=torch.int32)
    out_NHD, lse_HN = reference_flash(query_NHD, key_CKD, value_CKD, cu_q, cu_k, used_k, 3, 16, 0.3, causal=causal)
    first = 0
    for count, slot, length in zip(counts, slots, used, strict=True):
        keys, values = (x[16 * slot : 16 * slot + length].repeat_interleave(2, dim=1) for x in (key_CKD, value_CKD))
        for i in range(count):
            seen = length - count + i + 1 if causal else length
            scores_HX = torch.einsum("hd,xhd->hx", query_NHD[first + i], keys[:seen]) * 0.3
            torch.testing.assert_close(lse_HN[:, first + i], scores_HX.exp().sum(-1).log())
            torch.testing.assert_close(
                out_NHD[first + i], torch.einsum("hx,xhd->hd", scores_HX.softmax(-1), values[:seen])
            )
        first += count
    assert out_NHD[first:].isnan().all()


def test_folding_the_query_heads_changes_nothing() -> None:
    query_NHD = torch.randn(4, 6, 8, dtype=torch.float64)
    key_CKD, value_CKD = torch.randn(2, 10, 2, 8, dtype=torch.float64)
    cu_q, cu_k, used_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 4], [5, 0, 0], [5, 3]))
    out_NHD, lse_HN = reference_flash(query_NHD, key_CKD, value_CKD, cu_q, cu_k, used_k, 3, 5, 0.3)
    out, lse = reference_flash(folded(query_NHD, 2), key_CKD, value_CKD, cu_q * 3, cu_k, used_k, 9, 5, 0.3)
    torch.testing.assert_close(unfolded(out, 3), out_NHD)
    torch.testing.assert_close(unfolded_lse(lse, 3), lse_HN.T)


def attention(query_D: Tensor, key_CD: Tensor, value_CD: Tensor) -> tuple[Tensor, Tensor]:
    scores_C = key_CD @ query_D
    return (scores_C.softmax(0) @ value_CD)[None, None], scores_C.logsumexp(0)[None, None]


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_merging_two_halves_equals_the_whole(scale: float) -> None:
    """Also where one half outweighs the other by far more than a float holds."""
    generator = torch.Generator().manual_seed(1)
    query_D = torch.randn(8, generator=generator, dtype=torch.float64) * scale
    key_CD, value_CD = torch.randn(2, 20, 8, generator=generator, dtype=torch.float64)
    whole, _ = attention(query_D, key_CD, value_CD)
    first, second = attention(query_D, key_CD[:13], value_CD[:13]), attention(query_D, key_CD[13:], value_CD[13:])
    torch.testing.assert_close(merged(*first, *second), whole)
    nothing = torch.zeros(1, 1, 8, dtype=torch.float64), torch.full((1, 1), -torch.inf, dtype=torch.float64)
    torch.testing.assert_close(merged(*nothing, *second), second[0])


def test_merge_of_the_worked_example() -> None:
    one, zero = torch.ones(1, 1, 1), torch.zeros(1, 1, 1)
    lse_a, lse_b = torch.zeros(1, 1), torch.tensor([[3.0]]).log()
    torch.testing.assert_close(merged(one, lse_a, zero, lse_b).item(), 0.25)
    torch.testing.assert_close(merged(zero, lse_a, one, lse_b).item(), 0.75)


def test_order_of_the_worked_example() -> None:
    """Blocks of one row stay apart from trees of another slab and join those of their own."""
    cache = some_cache()
    slots = [cache.allocate(columns) for columns in (200, 100, 200)]
    blocks = [
        decode_block(slots[i], 9, 5, draft, None)
        for i, draft in enumerate((CHAIN, EMPTY_PROPOSAL.draft, EMPTY_PROPOSAL.draft))
    ]  # type: ignore[arg-type]
    step = ordered(blocks)
    assert step.order == (1, 0, 2)
    assert step.shape == StepShape((PartShape(128, "single", 1, 1, 1), PartShape(256, "tree", 2, 4, 3)), 5)


def test_part_arrays_of_the_worked_example() -> None:
    cache = some_cache()
    slots = [cache.allocate(100) for _ in range(3)]
    blocks = [decode_block(slots[0], 10, 5, EMPTY_PROPOSAL.draft, None), decode_block(slots[2], 20, 6, CHAIN, None)]  # type: ignore[arg-type]
    shape = StepShape((PartShape(128, "tree", 3, 6, 4),), 6)
    arrays = step_arrays(ordered(blocks), shape)
    assert arrays["token"].tolist() == [5, 6, 11, 12, 0, 0]
    assert arrays["position"].tolist() == [10, 20, 21, 22, 0, 0]
    assert arrays["sampled"].tolist() == [0, 1, 2, 3, 0, 0]
    assert arrays["0.column"].tolist() == [10, 276, 277, 278, 11, 11]
    assert arrays["0.cu_q"].tolist() == [0, 1, 4, 4]
    assert arrays["0.cu_k"].tolist() == [0, 256, 0, 0]
    assert arrays["0.used_k"].tolist() == [10, 20, 0]
    assert arrays["0.place"].tolist() == [0, 4, 5, 6, 0, 0]
    assert arrays["0.mask"][1].astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]]


def test_padding_writes_where_nobody_stores_anything() -> None:
    cache = some_cache()
    slots = [cache.allocate(100) for _ in range(2)]
    full, free = prompt_block(slots[0], 127, (1,), sampled=True), prompt_block(slots[1], 50, (1, 2), sampled=True)  # type: ignore[arg-type]
    assert scratch_column([full]) is None
    assert scratch_column([full, free]) == 128 + 52


def test_device_arrays_keep_their_place() -> None:
    arrays = {"a": np.arange(3, dtype=np.int32), "b": np.array([[True], [False]]), "c": np.arange(2)}
    on_device = DeviceArrays(arrays, torch.device("cpu"))
    before = {name: (view.data_ptr(), view.dtype) for name, view in on_device.views.items()}
    on_device.fill({"a": arrays["a"] + 7, "b": ~arrays["b"], "c": arrays["c"] - 5})
    assert {name: (view.data_ptr(), view.dtype) for name, view in on_device.views.items()} == before
    assert {name: view.tolist() for name, view in on_device.views.items()} == {
        "a": [7, 8, 9],
        "b": [[False], [True]],
        "c": [-5, -4],
    }


def mixed_step(runner: ModelRunner) -> list[Block]:
    """Trees, chains, single rows, a prompt's beginning and a later chunk of one, in three slabs and no order."""
    cache = KVCache(runner.kv_shape, 2**30, max_slots=16)
    generator = torch.Generator().manual_seed(1)
    lengths = (40, 23, 150, 17, 300, 0, 0, 70, 90)
    contexts = [torch.randint(5, 300, (length,), generator=generator).tolist() for length in lengths]
    slots = [slot for context in contexts if (slot := cache.allocate(len(context) + 30))]
    for context, slot in zip(contexts, slots, strict=True):
        if context:
            runner.forward([prompt_block(slot, 0, tuple(context), sampled=False)])
    many = tuple(range(30, 30 + MAX_TREE_ROWS + 4))
    single = EMPTY_PROPOSAL.draft
    return [
        decode_block(slots[0], 40, 9, TREE, None),
        prompt_block(slots[2], 150, many, sampled=True),
        decode_block(slots[1], 23, 9, single, None),
        decode_block(slots[4], 300, 9, single, None),
        prompt_block(slots[5], 0, many, sampled=False),
        prompt_block(slots[6], 0, (5,), sampled=True),
        decode_block(slots[3], 17, 9, CHAIN, EXTRA),
        prompt_block(slots[7], 70, (5, 6, 7), sampled=True),
        decode_block(slots[8], 90, 9, TREE, EXTRA),
    ]


@pytest.mark.parametrize("family", FULL_ATTENTION)
def test_the_step_equals_that_of_the_dense_backend(family: str, tiny_model_dir: Callable[[str], Path]) -> None:
    """Logits and what is stored. (test_model_runner compares the dense backend with the model's own attention.)"""
    runner = ModelRunner(load_model(ModelConfig(id=str(tiny_model_dir(family)), dtype="float64")).model)
    blocks = mixed_step(runner)
    slabs = {block.slot.capacity: block.slot.slab for block in blocks}
    before = {capacity: slab.kv_L2SCKD.clone() for capacity, slab in slabs.items()}
    expected_SV = runner.forward(blocks)
    expected_kv = {capacity: slab.kv_L2SCKD.clone() for capacity, slab in slabs.items()}
    for capacity, slab in slabs.items():
        slab.kv_L2SCKD.copy_(before[capacity])
    logits_SV = VarlenSteps(runner.model, reference_flash).forward(blocks)
    torch.testing.assert_close(logits_SV, expected_SV, rtol=1e-6, atol=1e-6)
    for capacity, slab in slabs.items():
        torch.testing.assert_close(slab.kv_L2SCKD, expected_kv[capacity], rtol=1e-6, atol=1e-6)


def test_a_wrong_kernel_shows(tiny_model_dir: Callable[[str], Path]) -> None:
    """The comparison above can fail: a log-sum-exp that is off by a little must change the logits."""
    runner = ModelRunner(load_model(ModelConfig(id=str(tiny_model_dir("llama")), dtype="float64")).model)
    blocks = mixed_step(runner)
    expected_SV = runner.forward(blocks)

    def off(*args: Tensor, **more: bool) -> tuple[Tensor, Tensor]:
        out, lse = reference_flash(*args, **more)  # type: ignore[arg-type]
        return out, lse + 0.01

    logits_SV = VarlenSteps(runner.model, off).forward(blocks)  # type: ignore[arg-type]
    assert not torch.allclose(logits_SV, expected_SV, rtol=1e-6, atol=1e-6)


def test_what_flash_attention_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cuda = torch.device("cuda")
    assert refusal(torch.bfloat16, cuda, 64, full=True) is None
    assert refusal(torch.float16, cuda, 256, full=True) is None
    assert refusal(torch.bfloat16, torch.device("cpu"), 64, full=True) == "it is not on a CUDA device"
    assert refusal(torch.float32, cuda, 64, full=True) == "it computes in float32"
    assert refusal(torch.bfloat16, cuda, 60, full=True) == "its head size is 60"
    assert refusal(torch.bfloat16, cuda, 512, full=True) == "its head size is 512"
    assert refusal(torch.bfloat16, cuda, 64, full=False) == "some of its layers slide or cap"
    capability = (7, 5)
    assert refusal(torch.float16, cuda, 64, full=True) == "its GPU is older than compute capability 8.0"


@pytest.mark.parametrize("release", ["2.11", "installed"])
@pytest.mark.parametrize("causal", [False, True])
def test_torch_takes_the_arguments_we_pass(release: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel needs a GPU, but names, order and shapes can be checked without data. `varlen_attn` of 2.11 lacks
    `seqused_k`."""
    if release == "2.11":
        monkeypatch.setattr(varlen, "varlen_attn", lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k: None)
    meta = torch.device("meta")
    query_NHD, key_CKD = torch.empty(5, 6, 8, device=meta), torch.empty(48, 2, 8, device=meta)
    cu_q, cu_k, used_k = (torch.empty(size, dtype=torch.int32, device=meta) for size in (4, 4, 3))
    out, lse = flash_attention(query_NHD, key_CKD, key_CKD, cu_q, cu_k, used_k, 3, 16, 0.3, causal=causal)
    assert out.shape == (5, 6, 8)
    assert lse.shape == (6, 5)
