"""Everything about CUDA graphs but the capture itself, on the CPU.

In place of a graph stands what it was captured from: the forward over the same buffers, run again. So what a graph
would not see change (sizes, columns, lengths, all that is not in the buffer) does not change here either.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.config import EngineConfig, ModelConfig, SamplingConfig
from pipeline.decoding_config import AutoConfig, AutoregressiveConfig, DecodingConfig, LookaheadConfig
from pipeline.errors import ConfigError
from tests.workers.flash_reference import reference_flash
from workers import cuda_graphs, varlen_steps
from workers.blocks import Block, decode_block, prompt_block
from workers.cuda_graphs import CAPTURE_AT, ROW_EDGES, at_least, padded
from workers.drafters.base import EMPTY_PROPOSAL, Draft
from workers.engine import Engine, Request
from workers.kv_cache import KVCache, Slot
from workers.model_loading import LoadedModel, load_model
from workers.model_runner import ModelRunner
from workers.step_shape import MAX_TREE_ROWS, PartShape, StepShape, ordered
from workers.varlen_steps import VarlenSteps

TREE = Draft((11, 12, 13), (-1, 0, 0), (0.8, 0.5, 0.2), ("test",) * 3)


class Recorder:
    """Stands for `GraphCapture`: its replays run the captured forward again."""

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0

    def __call__(self, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.captures += 1

        def replay() -> Tensor:
            self.replays += 1
            return forward()

        return replay


@pytest.fixture
def loaded(tiny_model_dir: Callable[[str], Path]) -> LoadedModel:
    return load_model(ModelConfig(id=str(tiny_model_dir("llama")), dtype="float64"))


def steps_of(loaded: LoadedModel, recorder: Recorder) -> VarlenSteps:
    return VarlenSteps(loaded.model, reference_flash, recorder)


def filled(cache: KVCache, runner: ModelRunner, lengths: list[int]) -> list[Slot]:
    slots = []
    for i, length in enumerate(lengths):
        slot = cache.allocate(length + 20)
        assert slot is not None
        runner.forward([prompt_block(slot, 0, tuple(range(5 + i, 5 + i + length)), sampled=False)])
        slot.used = length
        slots.append(slot)
    return slots


def test_padded_shapes_of_the_worked_example(loaded: LoadedModel) -> None:
    runner = ModelRunner(loaded.model)
    slots = filled(KVCache(runner.kv_shape, 2**30, 8), runner, [30] * 5)
    chain = Draft((11, 12), (-1, 0), (0.8, 0.5), ("test",) * 2)
    drafts = [chain, chain, *[EMPTY_PROPOSAL.draft] * 3]
    step = ordered([decode_block(slot, 30, 9, draft, None) for slot, draft in zip(slots, drafts, strict=True)])
    assert step.shape == StepShape((PartShape(128, "tree", 5, 9, 3),), 9)
    assert padded(step) == StepShape((PartShape(128, "tree", 8, 16, 4),), 16)


def test_what_is_not_captured(loaded: LoadedModel) -> None:
    runner = ModelRunner(loaded.model)
    (slot,) = filled(KVCache(runner.kv_shape, 2**30, 8), runner, [30])
    assert padded(ordered([prompt_block(slot, 30, (1,) * (MAX_TREE_ROWS + 1), sampled=True)])) is None
    assert padded(ordered([prompt_block(slot, 30, (1,) * MAX_TREE_ROWS, sampled=True)])) is not None
    assert padded(ordered([prompt_block(slot, 123, (1, 2, 3, 4, 5), sampled=True)])) is None, "no column for padding"
    assert padded(ordered([prompt_block(slot, 122, (1, 2, 3, 4, 5), sampled=True)])) is not None


def test_edges() -> None:
    assert list(ROW_EDGES) == sorted(set(ROW_EDGES))
    assert [at_least(ROW_EDGES, rows) for rows in (1, 3, 5, 8, 9, 65, 512)] == [1, 4, 8, 8, 16, 80, 512]


def decode_steps(slots: list[Slot], count: int) -> list[list[Block]]:
    """Steps of one shape whose columns, tokens, lengths, masks and slots all differ."""
    steps = []
    for i in range(count):
        blocks = [decode_block(slot, slot.used + i, 9 + i, EMPTY_PROPOSAL.draft, None) for slot in slots]
        turn = i % len(slots)
        blocks[turn] = decode_block(slots[turn], slots[turn].used + i, 20 + i, TREE, None)
        steps.append(blocks[i % 2 :])
    return steps


def test_a_replayed_step_equals_an_eager_one(loaded: LoadedModel) -> None:
    """Three slabs, trees that wander, and every other step has one block less than the shape has room for."""
    recorder = Recorder()
    runner, steps = ModelRunner(loaded.model, compile="off"), steps_of(loaded, recorder)
    slots = filled(KVCache(runner.kv_shape, 2**30, 16), runner, [30, 40, 25, 140, 150, 170, 300])
    for blocks in decode_steps(slots, 12):
        expected_SV = runner.forward(blocks)
        torch.testing.assert_close(steps.forward(blocks), expected_SV, rtol=1e-9, atol=1e-9)
    assert recorder.replays > recorder.captures > 0


def test_padding_leaves_committed_columns_alone(loaded: LoadedModel) -> None:
    recorder = Recorder()
    runner, steps = ModelRunner(loaded.model, compile="off"), steps_of(loaded, recorder)
    slots = filled(KVCache(runner.kv_shape, 2**30, 16), runner, [30, 40, 25])
    before = [slot.slab.kv_L2SCKD[:, :, slot.index, : slot.used].clone() for slot in slots]
    for _ in range(CAPTURE_AT + 1):
        steps.forward([decode_block(slot, slot.used, 9, EMPTY_PROPOSAL.draft, None) for slot in slots])
    assert recorder.replays
    for slot, kv in zip(slots, before, strict=True):
        assert torch.equal(slot.slab.kv_L2SCKD[:, :, slot.index, : slot.used], kv)


def test_a_reallocated_slab_is_captured_anew(loaded: LoadedModel) -> None:
    recorder = Recorder()
    runner, steps = ModelRunner(loaded.model, compile="off"), steps_of(loaded, recorder)
    cache = KVCache(runner.kv_shape, 2**30, 16)
    (slot,) = filled(cache, runner, [30])

    def step() -> None:
        blocks = [decode_block(slot, 30, 9, EMPTY_PROPOSAL.draft, None)]
        torch.testing.assert_close(steps.forward(blocks), runner.forward(blocks))

    for _ in range(CAPTURE_AT + 2):
        step()
    assert recorder.captures == 1
    held = slot.slab.kv_L2SCKD
    cache.allocate(100)  # the slab grows into a new tensor
    assert slot.slab.kv_L2SCKD is not held
    step()
    assert recorder.captures == 2


def test_graphs_are_few(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used goes."""
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 2)
    recorder = Recorder()
    runner, steps = ModelRunner(loaded.model, compile="off"), steps_of(loaded, recorder)
    (slot,) = filled(KVCache(runner.kv_shape, 2**30, 16), runner, [30])

    def captures_of(rows: int) -> int:
        before = recorder.captures
        for _ in range(CAPTURE_AT):
            steps.forward([prompt_block(slot, 30, (9,) * rows, sampled=True)])
        return recorder.captures - before

    assert [captures_of(rows) for rows in (1, 4, 1, 8)] == [1, 1, 0, 1]
    assert [captures_of(rows) for rows in (1, 4)] == [0, 1], "4 rows were the least recently used"


def test_without_memory_for_graphs_steps_run_eagerly(loaded: LoadedModel) -> None:
    def refuse(forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        raise torch.OutOfMemoryError("none left")

    runner = ModelRunner(loaded.model, compile="off")
    steps = VarlenSteps(loaded.model, reference_flash, refuse)
    (slot,) = filled(KVCache(runner.kv_shape, 2**30, 16), runner, [30])
    blocks = [decode_block(slot, 30, 9, TREE, None)]
    for _ in range(CAPTURE_AT + 1):
        torch.testing.assert_close(steps.forward(blocks), runner.forward(blocks))


def test_the_check_of_a_capture_can_fail(loaded: LoadedModel) -> None:
    shape = ModelRunner(loaded.model, compile="off").kv_shape
    steps_of(loaded, Recorder()).check(shape)
    stale = VarlenSteps(loaded.model, reference_flash, lambda forward: lambda: -forward())
    with pytest.raises(RuntimeError, match="its replayed logits differ"):
        stale.check(shape)


def of(loaded: LoadedModel, compile: str) -> VarlenSteps | None:
    runner = ModelRunner(loaded.model, compile="off")
    return VarlenSteps.of(loaded.model, runner._probe(), runner.kv_shape, compile)  # type: ignore[arg-type]


def test_without_flash_attention_compile_on_is_refused(loaded: LoadedModel) -> None:
    assert of(loaded, "auto") is None
    with pytest.raises(
        ConfigError, match=r"^engine.compile must be auto or off here, got on: LlamaForCausalLM, it is "
    ):
        of(loaded, "on")


def test_what_cannot_be_captured_runs_without_graphs(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __call__(self, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    monkeypatch.setattr(varlen_steps, "refusal", lambda *_, full: None)
    monkeypatch.setattr(varlen_steps, "GraphCapture", Failing)
    monkeypatch.setattr(VarlenSteps.__init__, "__defaults__", (reference_flash, None))
    steps = of(loaded, "auto")
    assert steps is not None
    assert steps.graphs is None
    with pytest.raises(
        ConfigError, match=r"its forward cannot be captured: operation not permitted when .* more lines$"
    ):
        of(loaded, "on")
    monkeypatch.setattr(varlen_steps, "GraphCapture", Recorder)
    steps = of(loaded, "on")
    assert steps is not None
    assert steps.graphs is not None


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "decoding",
    [AutoregressiveConfig(), AutoConfig(), AutoConfig(lookahead_width=3), LookaheadConfig()],
    ids=["plain", "auto", "auto-lookahead", "lookahead"],
)
def test_the_engine_says_the_same_through_padded_steps(
    loaded: LoadedModel, decoding: DecodingConfig, temperature: float
) -> None:
    """Sequences come, grow from slab to slab and leave; every step that could be a graph is one."""
    sampling = SamplingConfig(temperature=temperature, max_tokens=90, ignore_eos=True, n=2)
    requests = [Request(f"row-{i}", tuple(range(5 + i, 5 + i + 25 * (i + 1))) * 2, sampling) for i in range(4)]
    plain = Engine(loaded, EngineConfig(max_sequences=1, compile="off"), AutoregressiveConfig()).generate(requests)
    recorder = Recorder()
    engine = Engine(loaded, EngineConfig(max_sequences=5, compile="off"), decoding)
    engine.runner.varlen = steps_of(loaded, recorder)
    results = engine.generate(requests)
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    assert engine.runner.bucket_edges == ROW_EDGES
    assert recorder.replays > 2 * recorder.captures > 0
