"""Packed linear layers against plain ones, and the models that get them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeline.config import ModelConfig
from workers.blocks import Block
from workers.kv_cache import KVCache
from workers.model_loading import load_model
from workers.model_runner import ModelRunner
from workers.packing import PackedLinear, pack_linears

needs_mkldnn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@needs_mkldnn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 48), (2, 3, 48), (0, 48)])
def test_a_packed_layer_computes_what_the_plain_one_does(bias: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 80, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(shape, dtype=torch.bfloat16)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear)(x), linear(x), rtol=0.02, atol=0.02)


@needs_mkldnn
def test_only_plain_bfloat16_layers_are_replaced() -> None:
    class Special(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "plain": nn.Linear(16, 16, dtype=torch.bfloat16),
            "wide": nn.Linear(16, 16, dtype=torch.float32),
            "special": Special(16, 16, dtype=torch.bfloat16),
        }
    )
    assert pack_linears(model) == 1
    assert [type(layer) for layer in model.values()] == [PackedLinear, nn.Linear, Special]
    assert pack_linears(model) == 0


@needs_mkldnn
def test_a_layer_that_computes_something_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: x.new_zeros(*x.shape[:-1], self.out_features))
    assert pack_linears(nn.Sequential(nn.Linear(16, 16, dtype=torch.bfloat16))) == 0


@needs_mkldnn
@pytest.mark.parametrize("name", ["gpt_neox", "gemma2", "phi3"])
def test_models_without_compiled_kernels_get_packed_layers(tiny_model_dir: Callable[[str], Path], name: str) -> None:
    config = ModelConfig(id=str(tiny_model_dir(name)), dtype="bfloat16", device="cpu")
    logits = []
    for compile in ("off", "auto"):
        model = load_model(config).model
        runner = ModelRunner(model, compile)  # type: ignore[arg-type]
        packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
        assert bool(packed) == (compile == "auto")
        slot = KVCache(runner.kv_shape, 1 << 30, max_slots=1).allocate(16)
        assert slot is not None
        rows = tuple(range(12))
        logits.append(runner.forward([Block(slot, 0, tuple(range(3, 15)), rows, None, rows)]).double())
    deviation = (logits[0] - logits[1]).norm(dim=1) / logits[0].norm(dim=1)
    assert deviation.median() < 0.1
