"""CUDA graphs of decode steps: a shape that was met before is replayed instead of launched kernel by kernel.

A step of few rows takes longer to launch than to compute. A graph fixes every address and size, so steps are padded to
shapes on a grid (`padded`), their arrays copied into the buffer that the graph reads, and the graph replayed. What is
captured is the very forward that runs otherwise. Steps with prompt chunks, and shapes met for the first time, run
eagerly. A graph also holds the address of the slabs, so it is dropped when one of them was re-allocated.

Shape legend: S sampled rows, V vocabulary.
"""

from __future__ import annotations

import bisect
import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor

from workers.blocks import Block
from workers.device_arrays import DeviceArrays
from workers.step_shape import (
    MAX_TREE_ROWS,
    OrderedStep,
    PartShape,
    StepShape,
    ordered,
    scratch_column,
    step_arrays,
)

logger = logging.getLogger(__name__)

ROW_EDGES = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, 513, 64))
"""Rows of a part that graphs are captured for: up to the next edge, rows are free."""
BLOCK_ROW_EDGES = (4, 16, MAX_TREE_ROWS)
"""Rows of the longest block of a tree part."""
MAX_GRAPHS = 64
CAPTURE_AT = 2
"""How often a shape must be met before it is captured: many are met once, while a batch fills or drains."""


def padded(step: OrderedStep) -> StepShape | None:
    """The shape on the grid that stands for this step; None when it is too large, holds prompt chunks, or has no column
    for padding.

    Worked example: 5 blocks of 9 rows in all, the longest of 3, become 8 blocks of 16 rows, of at most 4.
    """
    parts = []
    for blocks, exact in zip(step.parts, step.shape.parts, strict=True):
        if exact.kind == "causal" or exact.rows > ROW_EDGES[-1] or exact.block_rows > MAX_TREE_ROWS:
            return None
        rows = at_least(ROW_EDGES, exact.rows)
        if exact.kind == "single":
            part = PartShape(exact.capacity, "single", rows, rows, 1)
        else:
            block_rows = at_least(BLOCK_ROW_EDGES, exact.block_rows)
            part = PartShape(exact.capacity, "tree", 1 << (exact.blocks - 1).bit_length(), rows, block_rows)
        if rows > exact.rows and scratch_column(blocks) is None:
            return None
        parts.append(part)
    rows = sum(part.rows for part in parts)
    return StepShape(tuple(parts), rows) if step.shape.sampled <= rows else None


def at_least(edges: Sequence[int], value: int) -> int:
    """The first edge that is not below `value`."""
    return edges[bisect.bisect_left(edges, value)]


class Replayed(Protocol):
    """A captured forward: it reads its input buffer and fills its output whenever it is replayed."""

    def __call__(self) -> Tensor: ...


Forward = Callable[[OrderedStep, StepShape, dict[str, Tensor]], Tensor]
"""The packed forward over arrays on the device: logits [S, V]."""
Capture = Callable[[Callable[[], Tensor]], Replayed]


@dataclass(slots=True)
class _Captured:
    inputs: DeviceArrays
    replay: Replayed
    storages: tuple[ref[Tensor], ...]


class StepGraphs:
    """Captured steps of one model replica, by padded shape; the least recently used goes when there are too many.

    `capture` turns a function without arguments into its replay (on a GPU `GraphCapture`).
    """

    bucket_edges = ROW_EDGES

    def __init__(self, forward: Forward, capture: Capture, device: torch.device) -> None:
        self._forward = forward
        self._capture = capture
        self._device = device
        self._captured: OrderedDict[StepShape, _Captured] = OrderedDict()
        self._met: dict[StepShape, int] = {}
        self._out_of_memory = False

    def forward(self, blocks: Sequence[Block]) -> Tensor | None:
        """Logits [S, V] of the step, or None when it must run eagerly."""
        step = ordered(blocks)
        shape = padded(step)
        if shape is None or self._out_of_memory:
            return None
        captured = self._valid(step, shape)
        if captured is None:
            self._met[shape] = self._met.get(shape, 0) + 1
            if self._met[shape] < CAPTURE_AT:
                return None
            try:
                captured = self._add(step, shape)
            except torch.OutOfMemoryError:
                logger.warning("no memory is left for CUDA graphs; steps run without them from here on")
                self._captured.clear()
                self._out_of_memory = True
                return None
        else:
            captured.inputs.fill(step_arrays(step, shape))
        # A copy: the next replay writes to the same place.
        return captured.replay()[: step.shape.sampled].clone()

    def _valid(self, step: OrderedStep, shape: StepShape) -> _Captured | None:
        captured = self._captured.get(shape)
        if captured is None:
            return None
        if any(kept() is not now for kept, now in zip(captured.storages, _storages(step), strict=True)):
            del self._captured[shape]
            return None
        self._captured.move_to_end(shape)
        return captured

    def _add(self, step: OrderedStep, shape: StepShape) -> _Captured:
        inputs = DeviceArrays(step_arrays(step, shape), self._device)
        while len(self._captured) >= MAX_GRAPHS:
            self._captured.popitem(last=False)
        replay = self._capture(lambda: self._forward(step, shape, inputs.views))
        captured = _Captured(inputs, replay, tuple(ref(storage) for storage in _storages(step)))
        self._captured[shape] = captured
        return captured


def _storages(step: OrderedStep) -> list[Tensor]:
    return [part[0].slot.slab.kv_L2SCKD for part in step.parts]


class GraphCapture:
    """Captures forwards on the current CUDA device. All graphs share one memory pool: no two replay at once.

    A failed capture raises what the forward raised (a forward that waits for the device cannot be captured).
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, forward: Callable[[], Tensor]) -> Replayed:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            forward()  # libraries choose their kernels and allocate their workspaces in a first run
        current.wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Not by `torch.cuda.graph`, which collects garbage and empties the allocator's cache each time. But nothing may
        # be collected while a capture is on: what it frees may need the device.
        collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    output = forward()
                finally:
                    graph.capture_end()
        finally:
            if collecting:
                gc.enable()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay
