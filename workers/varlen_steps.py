"""The packed forward with flash attention, as captured graphs where they pay: what runs on CUDA.

Shape legend: S sampled rows, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.errors import ConfigError
from workers.attention import AttentionProbe
from workers.blocks import Block, prompt_block
from workers.cuda_graphs import CAPTURE_AT, Capture, GraphCapture, StepGraphs
from workers.device_arrays import DeviceArrays
from workers.kv_cache import KVCache
from workers.kv_storage import KVShape
from workers.step_shape import OrderedStep, StepShape, ordered, step_arrays
from workers.varlen_attention import FlashKernel, flash_attention, refusal, varlen_layout

logger = logging.getLogger(__name__)

LEAST_LIKENESS = 0.99
"""Cosine of the angle between the logits of a replayed and of an eager step."""


class VarlenSteps:
    """One model behind `FlashKernel`, a GPU's unless another is given. With `capture`, decode steps become graphs."""

    def __init__(
        self, model: PreTrainedModel, kernel: FlashKernel = flash_attention, capture: Capture | None = None
    ) -> None:
        self._model = model
        self._kernel = kernel
        self.graphs = None if capture is None else StepGraphs(self._forward, capture, model.device)

    @classmethod
    def of(
        cls, model: PreTrainedModel, probe: AttentionProbe, kv_shape: KVShape, compile: Literal["auto", "off", "on"]
    ) -> VarlenSteps | None:
        """What serves this model, or None when flash attention cannot. Raises ConfigError for `compile: on` when there
        can be no graphs.
        """
        full = not any(layer.softcap or layer.sliding_window for layer in probe.layers.values())
        reason = refusal(kv_shape.dtype, kv_shape.device, kv_shape.head_size, full=full)
        steps = None if reason is not None else cls(model)
        if steps is not None and compile != "off":
            try:
                captured = cls(model, capture=GraphCapture())
                captured.check(kv_shape)
                steps = captured
            except RuntimeError as error:
                reason = f"its forward cannot be captured: {' '.join(str(error).split())[:200]}"
        if reason is not None and compile == "on":
            raise ConfigError(f"engine.compile must be auto or off here, got on: {type(model).__name__}, {reason}")
        if reason is not None:
            logger.info("%s runs without flash attention or without CUDA graphs: %s", type(model).__name__, reason)
        return steps

    @torch.inference_mode()
    def check(self, kv_shape: KVShape) -> None:
        """Raises RuntimeError when a step cannot be captured or when its replay says something else."""
        assert self.graphs is not None
        slot = KVCache(kv_shape, 1 << 40, max_slots=1).allocate(16)
        assert slot is not None
        self.forward([prompt_block(slot, 0, tuple(range(1, 9)), sampled=False)])
        blocks = [prompt_block(slot, 8, (9, 10, 11), sampled=True)]
        eager_V = self.eager(blocks)[0].double()
        for _ in range(CAPTURE_AT + 1):
            replayed_V = self.forward(blocks)[0].double()
        if not F.cosine_similarity(eager_V, replayed_V, dim=0).item() > LEAST_LIKENESS:
            raise RuntimeError("its replayed logits differ")

    @torch.inference_mode()
    def forward(self, blocks: Sequence[Block]) -> Tensor:
        """Logits [S, V] after the sampled rows of all blocks, in order; keys and values of all rows are stored."""
        logits_SV = None if self.graphs is None else self.graphs.forward(blocks)
        return self.eager(blocks) if logits_SV is None else logits_SV

    @torch.inference_mode()
    def eager(self, blocks: Sequence[Block]) -> Tensor:
        """The same, never through a graph."""
        step = ordered(blocks)
        arrays = DeviceArrays(step_arrays(step, step.shape), self._model.device)
        return self._forward(step, step.shape, arrays.views)

    def _forward(self, step: OrderedStep, shape: StepShape, arrays: dict[str, Tensor]) -> Tensor:
        output = self._model(
            input_ids=arrays["token"][None],
            position_ids=arrays["position"][None],
            use_cache=False,
            logits_to_keep=arrays["sampled"],
            step=varlen_layout(step, shape, arrays, self._kernel),
        )
        logits: Tensor = output.logits[0]
        return logits
