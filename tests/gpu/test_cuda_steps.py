"""Steps on a real GPU: which way is taken, flash attention against dense, captured graphs against eager steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline.config import EngineConfig, ModelConfig, SamplingConfig
from pipeline.decoding_config import AutoConfig, AutoregressiveConfig
from tests.workers.flash_reference import reference_flash
from tests.workers.test_cuda_graphs import decode_steps, filled
from tests.workers.test_varlen_attention import mixed_step
from workers.cuda_graphs import GraphCapture
from workers.engine import Engine, Request
from workers.kv_cache import KVCache
from workers.model_loading import LoadedModel, load_model
from workers.model_runner import ModelRunner
from workers.varlen_steps import VarlenSteps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ModelDir = Callable[[str], Path]


def load(tiny_model_dir: ModelDir, family: str, dtype: str) -> LoadedModel:
    return load_model(ModelConfig(id=str(tiny_model_dir(family)), dtype=dtype, device="cuda"))  # type: ignore[arg-type]


def test_which_way_a_model_takes(tiny_model_dir: ModelDir) -> None:
    runner = ModelRunner(load(tiny_model_dir, "llama", "bfloat16").model, "on")
    assert runner.varlen is not None
    assert runner.bucket_edges
    assert ModelRunner(load(tiny_model_dir, "llama", "bfloat16").model, "off").bucket_edges == ()
    assert ModelRunner(load(tiny_model_dir, "llama", "float32").model).varlen is None
    assert ModelRunner(load(tiny_model_dir, "gemma2", "bfloat16").model).varlen is None


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_flash_attention_errs_no_more_than_dense_attention(family: str, tiny_model_dir: ModelDir) -> None:
    """Both in bfloat16, measured against float32."""
    exact = ModelRunner(load(tiny_model_dir, family, "float32").model)
    expected_SV = exact.forward(mixed_step(exact))
    runner = ModelRunner(load(tiny_model_dir, family, "bfloat16").model, "off")
    steps = runner.varlen
    assert steps is not None
    flash_SV = runner.forward(mixed_step(runner)).float()
    runner.varlen = None
    dense_SV = runner.forward(mixed_step(runner)).float()
    assert (flash_SV - expected_SV).norm() < 1.3 * (dense_SV - expected_SV).norm() + 0.01 * expected_SV.norm()


def test_replayed_graphs_equal_eager_steps(tiny_model_dir: ModelDir) -> None:
    runner = ModelRunner(load(tiny_model_dir, "llama", "bfloat16").model, "on")
    steps = runner.varlen
    assert steps is not None
    slots = filled(KVCache(runner.kv_shape, 2**30, 16), runner, [30, 40, 25, 140, 150, 170, 300])
    for blocks in decode_steps(slots, 12):
        expected_SV = steps.eager(blocks).float()
        difference = (runner.forward(blocks).float() - expected_SV).norm() / expected_SV.norm()
        assert difference < 0.1  # other shapes, other kernels: bfloat16 rounds differently


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_engine_says_the_same_through_captured_float32_steps(temperature: float, tiny_model_dir: ModelDir) -> None:
    """Flash attention has no float32, so the plain kernel is captured: all but the kernel itself, token for token."""
    loaded = load(tiny_model_dir, "llama", "float32")
    sampling = SamplingConfig(temperature=temperature, max_tokens=90, ignore_eos=True, n=2)
    requests = [Request(f"row-{i}", tuple(range(5 + i, 5 + i + 25 * (i + 1))) * 2, sampling) for i in range(4)]
    plain = Engine(loaded, EngineConfig(max_sequences=1), AutoregressiveConfig()).generate(requests)
    engine = Engine(loaded, EngineConfig(max_sequences=5), AutoConfig())
    engine.runner.varlen = VarlenSteps(loaded.model, reference_flash, GraphCapture())
    results = engine.generate(requests)
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    graphs = engine.runner.varlen.graphs
    assert graphs is not None
    assert graphs._captured
