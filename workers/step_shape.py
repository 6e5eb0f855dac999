"""The packed step as arrays: which rows make a part, and what attention needs to know of them, padded or not.

A shape says how large every array is. The exact shape of a step has no padding; a padded one stands for many steps, so
that one captured graph serves them all. Padding is harmless: padding rows hold token 0, write to a column that nobody
sees and are never sampled; padding blocks are empty, or see one column where a block must have a row.

Shape legend: T rows of the step, N rows of a part, B blocks of a part, R rows of a block (padded), S sampled rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from workers.blocks import Block

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
Kind: TypeAlias = Literal["single", "tree", "causal"]

MAX_TREE_ROWS = 64
"""Blocks of more rows are prompt chunks (or very wide trees): too many to attend to each other densely for nothing."""


@dataclass(frozen=True, slots=True, order=True)
class PartShape:
    """`blocks` of one slab, of at most `block_rows` rows each and `rows` in all."""

    capacity: int
    kind: Kind
    blocks: int
    rows: int
    block_rows: int


@dataclass(frozen=True, slots=True)
class StepShape:
    """The parts of a step in order, and its sampled rows."""

    parts: tuple[PartShape, ...]
    sampled: int

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)


@dataclass(frozen=True, slots=True)
class OrderedStep:
    """Blocks of a step by part; `order[i]` is the place of the i-th in the step as it was given."""

    parts: tuple[tuple[Block, ...], ...]
    order: tuple[int, ...]
    shape: StepShape


def ordered(blocks: Sequence[Block]) -> OrderedStep:
    """Group blocks by slab and kind, and tell the exact shape. Blocks of one row are single if all of their slab are.

    Worked example: blocks of 1, 3, 1 rows of slabs 128, 256, 256 make two parts: (128, single, 1 block, 1 row) and
    (256, tree, 2 blocks, 4 rows of at most 3).
    """
    with_tree = {b.slot.capacity for b in blocks if b.num_rows > 1 and _kind(b) == "tree"}
    kinds: list[tuple[int, Kind]] = []
    for block in blocks:
        kind = _kind(block)
        small: Kind = "tree" if block.slot.capacity in with_tree else "single"
        kinds.append((block.slot.capacity, "causal" if kind == "causal" else small))
    order = sorted(range(len(blocks)), key=lambda i: kinds[i])
    parts, shapes = [], []
    for (capacity, kind), members in groupby(order, key=lambda i: kinds[i]):
        part = tuple(blocks[i] for i in members)
        rows = [block.num_rows for block in part]
        parts.append(part)
        shapes.append(PartShape(capacity, kind, len(part), sum(rows), max(rows)))
    sampled = sum(len(block.sampled) for block in blocks)
    return OrderedStep(tuple(parts), tuple(order), StepShape(tuple(shapes), sampled))


def _kind(block: Block) -> Kind:
    """Many causal rows go through the kernel's own causal mask, all others through a dense one."""
    return "causal" if block.mask_RR is None and block.num_rows > MAX_TREE_ROWS else "tree"


def step_arrays(step: OrderedStep, shape: StepShape) -> Arrays:
    """All of a step in arrays of the sizes that `shape` says: `token`, `position` [T], `sampled` [S] and those of
    `_part_arrays` for part i under `i.name`.

    `shape` has the parts of `step` with at least its sizes. Sampled rows come in the order of the blocks as given.
    """
    token_T = np.zeros(shape.rows, dtype=np.int64)
    position_T = np.zeros(shape.rows, dtype=np.int64)
    first_row_of = np.zeros(len(step.order), dtype=np.int64)
    blocks: list[Block] = []
    arrays: Arrays = {"token": token_T, "position": position_T}
    first = 0
    for i, (part, part_shape) in enumerate(zip(step.parts, shape.parts, strict=True)):
        row = first
        for block in part:
            rows = slice(row, row + block.num_rows)
            token_T[rows], position_T[rows] = block.tokens, block.positions
            first_row_of[len(blocks)] = row
            blocks.append(block)
            row = rows.stop
        arrays |= {f"{i}.{name}": array for name, array in _part_arrays(part, part_shape).items()}
        first += part_shape.rows
    sampled_S = np.zeros(shape.sampled, dtype=np.int64)
    place = {given: i for i, given in enumerate(step.order)}
    rows_S = [first_row_of[place[i]] + row for i in range(len(blocks)) for row in blocks[place[i]].sampled]
    sampled_S[: len(rows_S)] = rows_S
    return arrays | {"sampled": sampled_S}


def scratch_column(part: Sequence[Block]) -> int | None:
    """A flat column of the slab behind all that any sequence has stored or stores in this step: for padding rows.

    What is written there is overwritten before it is ever seen. None when every slot of the part is full to the brim.
    """
    for block in part:
        column = block.start + block.num_rows
        if column < block.slot.capacity:
            return block.slot.index * block.slot.capacity + column
    return None


def _part_arrays(part: Sequence[Block], shape: PartShape) -> Arrays:
    """`column` [N], `cu_q`, `cu_k` [B + 1], `used_k` [B] and for trees `row`, `mask`, `place`, `prefix` (see `Part`).

    Worked example, a tree part of slab 128 with a pending token at column 10 of slot 0 and three rows at column 20 of
    slot 2, padded to 3 blocks and 6 rows: column 10, 276, 277, 278, then the scratch column 11 twice; cu_q 0, 1, 4, 4;
    cu_k 0, 256, 0, 0; used_k 10, 20, 0.
    """
    rows = np.array([block.num_rows for block in part])
    starts = np.array([block.start for block in part])
    slots = np.array([block.slot.index for block in part])
    B, N = shape.blocks, shape.rows
    column_N = np.zeros(N, dtype=np.int64)
    columns = [
        np.arange(first, first + count) for first, count in zip(slots * shape.capacity + starts, rows, strict=True)
    ]
    used = int(rows.sum())
    column_N[:used] = np.concatenate(columns)
    if used < N:
        scratch = scratch_column(part)
        assert scratch is not None
        column_N[used:] = scratch
    cu_q = np.full(B + 1, used, dtype=np.int32)
    cu_q[: len(part) + 1] = np.cumsum([0, *rows])
    cu_k = np.zeros(B + 1, dtype=np.int32)
    cu_k[: len(part)] = slots * shape.capacity
    used_k = np.zeros(B, dtype=np.int32)
    used_k[: len(part)] = starts if shape.kind == "tree" else starts + rows
    if shape.kind == "single":  # every block has a row, padding too, and that must see something
        cu_q = np.arange(B + 1, dtype=np.int32)
        used_k[len(part) :] = 1
    arrays: Arrays = {"column": column_N, "cu_q": cu_q, "cu_k": cu_k, "used_k": used_k}
    return arrays | _tree_arrays(part, shape) if shape.kind == "tree" else arrays


def _tree_arrays(part: Sequence[Block], shape: PartShape) -> Arrays:
    B, R, N = shape.blocks, shape.block_rows, shape.rows
    row_BR = np.zeros((B, R), dtype=np.int64)
    mask_BRR = np.zeros((B, R, R), dtype=np.bool_)
    mask_BRR[:, :, 0] = True  # padding must see something: a softmax over nothing is NaN
    place_N = np.zeros(N, dtype=np.int64)
    prefix_N = np.zeros(N, dtype=np.bool_)
    first = 0
    for b, block in enumerate(part):
        rows = block.num_rows
        span = slice(first, first + rows)
        row_BR[b, :rows] = np.arange(first, first + rows)
        mask_BRR[b, :rows, :rows] = np.tri(rows, dtype=np.bool_) if block.mask_RR is None else block.mask_RR
        place_N[span] = b * R + np.arange(rows)
        prefix_N[span] = block.start > 0
        first += rows
    return {"row": row_BR, "mask": mask_BRR, "place": place_N, "prefix": prefix_N}
