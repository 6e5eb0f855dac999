"""The compiled kernels against the model's own modules under a dense mask, and rows bit for bit alike in every step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from pipeline.config import ModelConfig
from workers.blocks import Block, decode_block, prompt_block
from workers.drafters.base import EMPTY_DRAFT, Draft, ExtraRows
from workers.kv_cache import KVCache, Slot
from workers.model_loading import load_model
from workers.model_runner import ModelRunner
from workers.native.build import NativeUnavailable, load_kernels
from workers.native.decoder import packed, step_arrays
from workers.native.structure import read_structure

try:
    load_kernels()
except NativeUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

FAMILIES = ["llama_native", "llama_wide_native", "qwen2_native", "qwen3_native", "mistral_native"]
DTYPES = ["float32", "bfloat16"]
EXTRA = ExtraRows((7, 8), (1, 2), np.array([[True, False], [True, True]]), (0, 1))
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}

RunnerOf = Callable[[str, str], ModelRunner]


def tree(parents: tuple[int, ...], tokens: tuple[int, ...] | None = None) -> Draft:
    size = len(parents)
    return Draft(tokens or tuple(range(11, 11 + size)), parents, (0.5,) * size, ("test",) * size)


@pytest.fixture(scope="module")
def runner_of(tiny_model_dir: Callable[[str], Path]) -> RunnerOf:
    made: dict[tuple[str, str], ModelRunner] = {}

    def get(family: str, dtype: str) -> ModelRunner:
        key = (family, dtype)
        if key not in made:
            made[key] = ModelRunner(load_model(ModelConfig(id=str(tiny_model_dir(family)), dtype=dtype)).model, "on")
        return made[key]

    return get


def in_memory(compile: str = "on", dtype: str = "float32", **arguments: Any) -> ModelRunner:
    """A Llama with other sizes than the tiny models on disk."""
    shape: dict[str, Any] = {
        "vocab_size": 37,
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "head_dim": 32,
        "initializer_range": 0.5,
    }
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**{**shape, **arguments}), dtype=getattr(torch, dtype))
    return ModelRunner(model.eval(), compile)  # type: ignore[arg-type]


def cache_of(runner: ModelRunner) -> KVCache:
    return KVCache(runner.kv_shape, 2**30, max_slots=16)


def new_slot(cache: KVCache, columns: int) -> Slot:
    slot = cache.allocate(columns)
    assert slot is not None
    return slot


def dense_logits(model: PreTrainedModel, tokens: list[int], positions: list[int], sees: Tensor) -> Tensor:
    """Logits `[T, V]` with row r attending to the rows that `sees[r]` names, within the sliding window."""
    position = torch.tensor(positions)
    window = getattr(model.config, "sliding_window", None)
    if window is not None and getattr(model.config, "use_sliding_window", True):
        sees = sees & (position[:, None] - position[None] < window)
    mask = torch.zeros(sees.shape, dtype=model.dtype).masked_fill(~sees, torch.finfo(model.dtype).min)[None, None]
    with torch.inference_mode():
        output = model(
            input_ids=torch.tensor([tokens]), position_ids=position[None], attention_mask=mask, use_cache=False
        )
    logits: Tensor = output.logits[0]
    return logits


def dense_logits_of(model: PreTrainedModel, context: list[int], block: Block) -> Tensor:
    """What a block's sampled rows should say behind `context`."""
    total = len(context) + block.num_rows
    sees = torch.ones(total, total, dtype=torch.bool).tril()
    if block.mask_RR is not None:
        sees[len(context) :, len(context) :] = torch.from_numpy(block.mask_RR)
    tokens, positions = [*context, *block.tokens], [*range(len(context)), *block.positions]
    return dense_logits(model, tokens, positions, sees)[[len(context) + row for row in block.sampled]]


# ---- the same numbers as the model's own modules --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_step_equals_dense_attention(
    family: str, dtype: str, runner_of: RunnerOf, tiny_model_dir: Callable[[str], Path]
) -> None:
    """A prompt chunk, trees with and without extra rows, a chain, one row alone, a fresh prompt; slots of two slabs.

    Contexts of 0 to 150 columns: with the window of 16 some trees lie across its edge, and one is deeper than it.
    """
    runner = runner_of(family, dtype)
    reference = AutoModelForCausalLM.from_pretrained(
        tiny_model_dir(family), dtype=torch.float64, attn_implementation="sdpa"
    ).eval()
    cache = cache_of(runner)
    generator = torch.Generator().manual_seed(1)
    lengths = (40, 23, 150, 15, 16, 5, 0, 3)
    contexts = [torch.randint(5, 300, (length,), generator=generator).tolist() for length in lengths]
    slots = [new_slot(cache, length + 40) for length in lengths]
    for context, slot in zip(contexts, slots, strict=True):
        if context:
            runner.forward([prompt_block(slot, 0, tuple(context), sampled=False)])
    blocks = [
        prompt_block(slots[0], 40, tuple(range(30, 67)), sampled=True),
        decode_block(slots[1], 23, 9, tree((-1, 0, 0)), None),
        decode_block(slots[2], 150, 9, tree((-1, 0, -1, 2)), EXTRA),
        decode_block(slots[3], 15, 9, tree((-1, 0, -1, 1)), None),
        decode_block(slots[4], 16, 9, tree((-1, 0, 1, 2, 3)), None),
        decode_block(slots[5], 5, 9, EMPTY_DRAFT, None),
        prompt_block(slots[6], 0, (17,), sampled=True),
        decode_block(slots[7], 3, 9, tree((-1, *range(20), 4)), None),
    ]
    logits = runner.forward(blocks)
    expected = torch.cat([dense_logits_of(reference, c, b) for c, b in zip(contexts, blocks, strict=True)])
    if dtype == "float32":
        torch.testing.assert_close(logits.double(), expected, rtol=1e-3, atol=2e-3)
    else:
        deviation = (logits.double() - expected).norm(dim=1) / expected.norm(dim=1)
        assert deviation.median() < 0.1
        assert deviation.max() < 1


@pytest.mark.parametrize("kind", ROPES)
def test_scaled_rotary_positions(kind: str) -> None:
    """Positions of two pieces of the rotary table; another scaling must show."""
    prompt = tuple(int(i * 7 % 37) for i in range(1030))
    logits = {}
    for name, compile in (("own", "off"), ("native", "on")):
        runner = in_memory(
            compile, max_position_embeddings=2048, rope_parameters={"rope_type": kind, **ROPES[kind], "rope_theta": 1e4}
        )
        assert (runner.native is not None) == (name == "native")
        rows = tuple(range(1000, 1030))
        slot = new_slot(cache_of(runner), len(prompt))
        logits[name] = runner.forward([Block(slot, 0, prompt, tuple(range(len(prompt))), None, rows)])
    torch.testing.assert_close(logits["native"], logits["own"], rtol=1e-3, atol=1e-3)
    plain = in_memory(max_position_embeddings=2048)
    other = plain.forward([Block(new_slot(cache_of(plain), 1030), 0, prompt, tuple(range(1030)), None, rows)])
    assert not torch.allclose(other, logits["own"], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        {},  # one layer, 37 tokens, all other sizes the least
        {"vocab_size": 16},
        {"vocab_size": 33, "num_hidden_layers": 3, "tie_word_embeddings": True},
        {"hidden_size": 208, "intermediate_size": 144, "num_attention_heads": 13, "num_key_value_heads": 13},
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 96},
        {"intermediate_size": 32 * 16 + 16, "head_dim": 128},
        {"intermediate_size": 6176},  # its pairs of panels are too long to be fetched a pair ahead
    ],
)
def test_odd_sizes(sizes: dict[str, Any], dtype: str) -> None:
    native, own = in_memory("on", dtype, **sizes), in_memory("off", dtype, **sizes)
    prompt = tuple(i * 5 % 16 for i in range(300))
    logits = []
    for runner in (native, own):
        slot = new_slot(cache_of(runner), 301)
        first = runner.forward([prompt_block(slot, 0, prompt[:1], sampled=True)])
        rest = runner.forward([Block(slot, 1, prompt[1:], tuple(range(1, 300)), None, tuple(range(299)))])
        logits.append(torch.cat([first, rest]).double())
    assert logits[0].shape == (300, sizes.get("vocab_size", 37))
    deviation = (logits[0] - logits[1]).norm(dim=1) / logits[1].norm(dim=1)
    assert deviation.median() < (1e-5 if dtype == "float32" else 0.1)
    if dtype == "float32":
        torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3)


def test_float32_is_as_close_to_float64_as_the_models_own_modules() -> None:
    """One chain of additions over 1024 or 2064 values would be twice as far off."""
    sizes: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 2064,
        "num_attention_heads": 4,
        "initializer_range": 0.05,
    }
    native, own, exact = in_memory("on", **sizes), in_memory("off", **sizes), in_memory("off", "float64", **sizes)
    exact.model.load_state_dict(native.model.state_dict())
    rows = tuple(range(30))
    logits = []
    for runner in (native, own, exact):
        block = Block(new_slot(cache_of(runner), 30), 0, rows, rows, None, rows)
        logits.append(runner.forward([block]).double())
    native_error, own_error = ((values - logits[2]).norm() for values in logits[:2])
    assert native_error < 1.2 * own_error


def test_a_step_without_sampled_rows() -> None:
    runner = in_memory()
    slot = new_slot(cache_of(runner), 9)
    assert runner.forward([prompt_block(slot, 0, (1, 2, 3), sampled=False)]).shape == (0, 37)
    assert slot.slab.kv_L2SCKD[0, :, 0, :3].abs().sum(dim=(-1, -2)).min() > 0
    assert slot.slab.kv_L2SCKD[0, :, 0, 3:].abs().sum() == 0, "nothing is written beyond the rows of the step"


def test_a_token_beyond_the_vocabulary_is_an_error_not_a_crash() -> None:
    runner = in_memory()
    with pytest.raises(IndexError):
        runner.forward([prompt_block(new_slot(cache_of(runner), 9), 0, (99,), sampled=True)])


def test_packed_weights_of_the_worked_example() -> None:
    weight_NM = torch.arange(17 * 4, dtype=torch.float32).view(17, 4)
    floats = packed(weight_NM)
    assert floats.shape == (1, 4, 2, 16, 1)
    assert floats[0, :, 0, 5, 0].tolist() == weight_NM[5].tolist()
    assert floats[0, :, 1, 0, 0].tolist() == weight_NM[16].tolist()
    assert floats[0, :, 1, 1:].abs().sum() == 0
    halves = packed(weight_NM.bfloat16())
    assert halves.shape == (1, 2, 2, 16, 2)
    assert halves[0, 1, 0, 3].tolist() == weight_NM[3, 2:4].tolist()


def test_step_arrays_of_the_worked_example() -> None:
    runner = in_memory()
    cache = cache_of(runner)
    slots = [new_slot(cache, 20), new_slot(cache, 20)]
    blocks = [prompt_block(slots[0], 4, (5, 6), sampled=True), decode_block(slots[1], 10, 9, tree((-1, -1, 0)), None)]
    arrays = step_arrays(blocks)
    assert arrays["column"].tolist() == [4, 5, 10, 11, 12, 13]
    assert arrays["contiguous"].tolist() == [5, 6, 10, 10, 10, 10]
    assert arrays["position"].tolist() == [4, 5, 10, 11, 11, 12]
    assert arrays["seen_begin"].tolist() == [0, 0, 0, 1, 3, 5, 8]
    assert arrays["seen"].tolist() == [2, 2, 3, 2, 4, 2, 3, 5]
    assert arrays["sampled"].tolist() == [1, 2, 3, 4, 5]
    kv = slots[0].slab.kv_L2SCKD
    assert arrays["key_base"].tolist() == [kv[0, 0, 0].data_ptr()] * 2 + [kv[0, 0, 1].data_ptr()] * 4
    assert all(values.itemsize == 8 for values in arrays.values())
    chain = step_arrays([blocks[0], decode_block(slots[1], 10, 9, tree((-1, 0)), None)])
    assert chain["contiguous"].tolist() == [5, 6, 11, 12, 13], "a chain is causal"
    assert chain["seen_begin"].tolist() == [0] * 6
    assert chain["seen"].tolist() == []


# ---- independence of rows, bit for bit ------------------------------------------------------------------------------


@st.composite
def work(draw: st.DrawFn) -> list[tuple[list[int], list[int], tuple[int, ...], bool]]:
    """Sequences of one step: context, where it was cut into chunks, parents of the draft, whether extra rows follow."""
    sequences = []
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.one_of(st.integers(0, 40), st.integers(120, 140)))
        context = [draw(st.integers(0, 2**16)) * 31 % 300 + i % 20 for i in range(min(length, 6))]
        context += [i * 13 % 300 for i in range(length - len(context))]
        cuts = sorted(draw(st.sets(st.integers(1, max(1, length - 1)), max_size=4)))
        parents = tuple(draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(0, 9))))
        if draw(st.integers(0, 4)) == 0:
            parents = (-1, *range(draw(st.integers(1, 20))))
        sequences.append((context, cuts, parents, draw(st.booleans())))
    return sequences


def decode_alone(runner: ModelRunner, slot: Slot, tokens: list[int], start: int = 0) -> Tensor:
    """Logits after every token from `start` on, one row per step."""
    steps = [runner.forward([decode_block(slot, i, tokens[i], EMPTY_DRAFT, None)]) for i in range(start, len(tokens))]
    return torch.cat(steps) if steps else torch.empty(0)


def path_to(parents: tuple[int, ...], node: int) -> list[int]:
    return [] if node < 0 else [*path_to(parents, parents[node]), node]


def check_step_against_plain(runner: ModelRunner, sequences: Any) -> None:
    """All sequences in one step against each row's own path, one token at a time and alone: logits, keys, values."""
    together, alone = cache_of(runner), cache_of(runner)
    blocks = []
    for context, cuts, parents, with_extra in sequences:
        slot = new_slot(together, len(context) + 20)
        for begin, end in zip([0, *cuts], [*cuts, len(context)], strict=True):
            if begin < end <= len(context):
                runner.forward([prompt_block(slot, begin, tuple(context[begin:end]), sampled=False)])
        blocks.append(decode_block(slot, len(context), 9, tree(parents), EXTRA if with_extra else None))
    logits = runner.forward(blocks)
    row = 0
    for (context, _, parents, _), block in zip(sequences, blocks, strict=True):
        slot = new_slot(alone, len(context) + 20)
        decode_alone(runner, slot, context)
        got, want = block.slot.slab.kv_L2SCKD[:, :, block.slot.index], slot.slab.kv_L2SCKD[:, :, slot.index]
        start = len(context)
        assert torch.equal(got[:, :, :start], want[:, :, :start])
        for node in range(-1, len(parents)):
            nodes = path_to(parents, node)
            expected = decode_alone(runner, slot, [*context, 9, *(11 + n for n in nodes)], start)
            assert torch.equal(logits[row + node + 1], expected[-1]), (context, parents, node)
            columns = torch.tensor([start, *(start + 1 + n for n in nodes)])
            assert torch.equal(got[:, :, columns], want[:, :, start : start + len(columns)])
        row += len(block.sampled)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_rows_do_not_depend_on_their_step(family: str, dtype: str, runner_of: RunnerOf, data: st.DataObject) -> None:
    check_step_against_plain(runner_of(family, dtype), data.draw(work()))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_matter(dtype: str, runner_of: RunnerOf) -> None:
    runner = runner_of("llama_wide_native", dtype)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        slots = [new_slot(cache_of(runner), 200) for _ in range(3)]
        first = runner.forward(
            [prompt_block(slot, 0, tuple(range(5 + i, 120)), sampled=True) for i, slot in enumerate(slots)]
        )
        drafts = runner.forward([decode_block(slots[0], 115, 9, tree((-1, 0, 0, -1)), None)])
        results.append((first, drafts, *(slot.slab.kv_L2SCKD for slot in slots)))
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chunk_of_300_rows_equals_one_at_a_time(dtype: str, runner_of: RunnerOf) -> None:
    runner = runner_of("mistral_native", dtype)
    tokens = [i * 17 % 320 for i in range(300)]
    slot, other = new_slot(cache_of(runner), 300), new_slot(cache_of(runner), 300)
    rows = tuple(range(300))
    chunk = runner.forward([Block(slot, 0, tuple(tokens), rows, None, rows)])
    assert torch.equal(chunk, decode_alone(runner, other, tokens))
    assert torch.equal(slot.slab.kv_L2SCKD, other.slab.kv_L2SCKD)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama_native", "llama_wide_native", "mistral_native"])
def test_rows_do_not_depend_on_who_attends_with_them(family: str, dtype: str, runner_of: RunnerOf) -> None:
    """Chunks of every size up to 20, so that groups of all heights begin and end anywhere in a block of columns."""
    runner = runner_of(family, dtype)
    tokens = [i * 17 % 300 for i in range(210)]
    slot, other = new_slot(cache_of(runner), 210), new_slot(cache_of(runner), 210)
    chunks, start = [], 0
    for size in range(1, 21):
        rows = tuple(range(start, start + size))
        block = Block(slot, start, tuple(tokens[start : start + size]), rows, None, tuple(range(size)))
        chunks.append(runner.forward([block]))
        start += size
    assert torch.equal(torch.cat(chunks), decode_alone(runner, other, tokens))


def test_the_order_of_blocks_does_not_matter(runner_of: RunnerOf) -> None:
    runner = runner_of("qwen3_native", "bfloat16")
    cache = cache_of(runner)
    slots = [new_slot(cache, 100) for _ in range(4)]
    blocks = [prompt_block(slot, 0, tuple(range(3 + i, 20 + 3 * i)), sampled=True) for i, slot in enumerate(slots)]
    forth = runner.forward(blocks)
    assert torch.equal(forth, runner.forward(blocks[::-1]).flip(0))


def test_the_models_own_modules_do_depend_on_the_step(runner_of: RunnerOf) -> None:
    """The control: the same checks fail where they should, so they could have found something above."""
    runner = runner_of("llama_native", "bfloat16")
    context = [i * 13 % 300 for i in range(60)]
    sequences = [(context, [30], (-1, 0, 1, -1, 3), False), (context[:20], [], (-1,), True)]
    check_step_against_plain(runner, sequences)
    native, runner.native = runner.native, None
    try:
        with pytest.raises(AssertionError):
            check_step_against_plain(runner, sequences)
    finally:
        runner.native = native


@pytest.mark.usefixtures("two_threads")
def test_engines_in_several_threads_at_once(runner_of: RunnerOf) -> None:
    """Each thread has OpenMP threads and scratch of its own; weights and the rotary table are shared."""
    runner = runner_of("llama_wide_native", "bfloat16")
    tokens = [i * 17 % 320 for i in range(80)]
    expected = decode_alone(runner, new_slot(cache_of(runner), 80), tokens)
    barrier = threading.Barrier(4)

    def one(_: int) -> Tensor:
        slot = new_slot(cache_of(runner), 80)
        barrier.wait()
        return decode_alone(runner, slot, tokens)

    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(one, range(4)):
            assert torch.equal(result, expected)


def test_engines_share_the_packed_weights(runner_of: RunnerOf) -> None:
    runner = runner_of("llama_native", "float32")
    assert ModelRunner(runner.model).native is runner.native
    assert read_structure(runner.model, runner._probe()).heads == 3
