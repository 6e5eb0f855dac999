"""What an adapter's slots are shown: the inputs of windows, compiled where the base is.

Shape legend: W windows, L slots, E hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

import torch
from torch import Tensor

from workers.drafters.ptp_windows import Window
from workers.model_runner import ModelRunner
from workers.native.build import NativeUnavailable
from workers.native.slots import NOTHING, NativeSlots
from workers.ptp.adapter import Adapter
from workers.randomness import NoiseKey, streams, uniforms


class SlotInputs:
    """Inputs of slots for an adapter whose base a runner runs."""

    def __init__(self, adapter: Adapter, runner: ModelRunner) -> None:
        self._adapter = adapter
        self._device = runner.device
        self._native: NativeSlots | None = None
        if runner.native is not None:
            with suppress(NativeUnavailable):
                self._native = NativeSlots(adapter.embedding, runner.native.embedding_VE)

    def __call__(self, windows: Sequence[Window]) -> list[Tensor]:
        """Inputs `[L, E]` of the slots of each window."""
        if not windows:
            return []
        return self._tensors(windows) if self._native is None else self._compiled(self._native, windows)

    def _compiled(self, native: NativeSlots, windows: Sequence[Window]) -> list[Tensor]:
        keys: list[NoiseKey] = []
        indices: list[int] = []
        tokens: list[int] = []
        config = self._adapter.config
        for window in windows:
            some_keys, some_indices = window.streams(0, window.slots)
            if config.head == "c":  # such a slot is shown the noise of the one before
                some_keys, some_indices = [some_keys[0], *some_keys[:-1]], [NOTHING, *some_indices[:-1]]
            keys += some_keys
            indices += some_indices
            tokens += [window.last_token if config.slot_zero == "context_token" else NOTHING]
            tokens += [NOTHING] * (window.slots - 1)
        inputs_RE = native(keys, indices, tokens)
        ends = list(accumulate(window.slots for window in windows))
        return [inputs_RE[end - window.slots : end] for end, window in zip(ends, windows, strict=True)]

    @torch.inference_mode()
    def _tensors(self, windows: Sequence[Window]) -> list[Tensor]:
        most = max(window.slots for window in windows)
        parts = [window.streams(0, most) for window in windows]
        keys = [key for some, _ in parts for key in some]
        indices = [index for _, some in parts for index in some]
        u_WL = uniforms(streams(keys, indices, self._device)).view(len(windows), most)
        last_W = torch.tensor([window.last_token for window in windows], device=self._device)
        inputs_WLE = self._adapter.slot_inputs(u_WL, last_W)
        return [inputs_LE[: window.slots] for inputs_LE, window in zip(inputs_WLE, windows, strict=True)]
