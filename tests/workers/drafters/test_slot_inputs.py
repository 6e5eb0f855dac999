"""Compiled inputs of slots against the adapter's own tensor operations, which training uses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline.adapter_config import EmbeddingKind, Head, SlotZero
from pipeline.config import ModelConfig, SamplingConfig
from tests.workers.ptp.makers import make_adapter
from workers.drafters.base import DraftContext
from workers.drafters.ptp_windows import Window
from workers.drafters.slot_inputs import SlotInputs
from workers.model_loading import load_model
from workers.model_runner import ModelRunner
from workers.native.build import NativeUnavailable, load_kernels
from workers.randomness import noise_key

KINDS: list[EmbeddingKind] = ["arithmetic", "bits32", "threshold", "linear", "constant"]


def ragged_windows(sampling: SamplingConfig) -> list[Window]:
    """Windows of 3, 1 and 5 slots; the first one begins with the first output token."""
    windows = []
    for i, (length, prompt_length, slots) in enumerate(((4, 4, 3), (9, 4, 1), (30, 7, 5))):
        noise_sets = [t // 8 * 8 % 3 for t in range(length - prompt_length)]
        noise = noise_key(5, f"row-{i}", 0)
        context = DraftContext(i, "", list(range(length)), prompt_length, sampling, noise, noise_sets=noise_sets)
        windows.append(Window(context, length, 3 + i, slots, noise_set=i))
    return windows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", ["o", "c"])
@pytest.mark.parametrize("slot_zero", ["context_token", "plain"])
def test_compiled_inputs_are_those_of_training(
    tiny_model_dir: Callable[[str], Path], dtype: str, kind: EmbeddingKind, head: Head, slot_zero: SlotZero
) -> None:
    try:
        load_kernels()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    loaded = load_model(ModelConfig.model_validate({"id": str(tiny_model_dir("llama_native")), "dtype": dtype}))
    adapter = make_adapter(loaded, head=head, embedding=kind, slot_zero=slot_zero).requires_grad_(False)
    if adapter.embedding.start is not None:
        torch.nn.init.normal_(adapter.embedding.start)
    inputs = SlotInputs(adapter, ModelRunner(loaded.model))
    assert inputs._native is not None
    for sampling in (
        SamplingConfig(temperature=0.7, coupling="inverse_cdf"),
        SamplingConfig(temperature=0.7, coupling="inverse_cdf", noise_sets=3, noise_stretch=8),
    ):
        windows = ragged_windows(sampling)
        compiled, expected = inputs(windows), inputs._tensors(windows)
        assert [len(part) for part in compiled] == [3, 1, 5]
        for ours, theirs in zip(compiled, expected, strict=True):
            assert ours.dtype == loaded.model.dtype
            # sums of up to 32 vectors in another order, then rounded
            torch.testing.assert_close(ours, theirs, rtol=1e-5 if dtype == "float32" else 1e-2, atol=1e-5)
    assert inputs([]) == []
