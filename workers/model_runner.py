"""Packed forward of an unmodified transformers model: blocks of rows in, logits of the sampled rows out.

Shape legend: T rows of the step, R rows of a block (padded), B blocks, C columns, S sampled rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.errors import ConfigError
from workers.attention import ATTENTION_NAME, AttentionProbe, BlockGroup, StepLayout
from workers.drafters.base import Draft, ExtraRows
from workers.kv_cache import KVShape, Slab, Slot

MAX_BATCHED_ROWS = 16
"""Blocks of more rows attend in a call of their own: padding the others to their size would cost more than the call."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one sequence in one step: tokens that are not cached yet, then draft nodes, then extra rows.

    Rows are written to columns start, start + 1, ..; row r has position `positions[r]` and sees the columns before
    `start` and the rows that `mask_RR[r]` names (None: causal). Logits are wanted after the rows in `sampled`.
    """

    slot: Slot
    start: int
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    mask_RR: npt.NDArray[np.bool_] | None
    sampled: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return len(self.tokens)


def prompt_block(slot: Slot, start: int, tokens: tuple[int, ...], *, sampled: bool) -> Block:
    """A causal chunk of committed tokens; with `sampled`, logits after its last row."""
    positions = tuple(range(start, start + len(tokens)))
    return Block(slot, start, tokens, positions, None, (len(tokens) - 1,) if sampled else ())


def decode_block(slot: Slot, start: int, pending: int, draft: Draft, extra: ExtraRows | None) -> Block:
    """The pending token, the draft tree, and the extra rows of one sequence (see `block_mask`)."""
    tokens = (pending, *draft.tokens)
    positions = (start, *(start + depth for depth in draft.depths))
    sampled = tuple(range(len(tokens)))
    if extra is not None:
        sampled += tuple(len(tokens) + row for row in extra.sampled)
        tokens += extra.tokens
        positions += tuple(start + offset for offset in extra.offsets)
    mask_RR = block_mask(draft, extra) if len(tokens) > 1 else None
    return Block(slot, start, tokens, positions, mask_RR, sampled)


def block_mask(draft: Draft, extra: ExtraRows | None) -> npt.NDArray[np.bool_]:
    """Which rows of a decode block see which: ancestors and self; extra rows see the pending token and each other.

    Worked example, draft b, c, d with parents -1, 0, 0 below pending `a`, no extra rows:

            a b c d
        a   1 0 0 0
        b   1 1 0 0
        c   1 1 1 0
        d   1 1 0 1
    """
    nodes = 1 + len(draft)
    rows = nodes + (0 if extra is None else len(extra))
    mask_RR = np.zeros((rows, rows), dtype=np.bool_)
    mask_RR[:, 0] = True
    for i, parent in enumerate(draft.parents):
        mask_RR[i + 1] = mask_RR[parent + 1]
        mask_RR[i + 1, i + 1] = True
    if extra is not None:
        mask_RR[nodes:, nodes:] = extra.mask_EE
    return mask_RR


def plan_layout(blocks: list[Block], device: torch.device) -> StepLayout:
    """Group blocks by slab and size, and say where each row's keys and values go."""
    first_rows = np.cumsum([0, *(block.num_rows for block in blocks)])
    by_slab: dict[int, list[int]] = {}
    for i, block in enumerate(blocks):
        by_slab.setdefault(block.slot.capacity, []).append(i)
    writes: list[tuple[Slab, Tensor | None, Tensor]] = []
    groups = []
    for members in by_slab.values():
        slab = blocks[members[0]].slot.slab
        rows = np.concatenate([np.arange(first_rows[i], first_rows[i + 1]) for i in members])
        columns = np.concatenate([_flat_columns(blocks[i]) for i in members])
        row_index = None if len(by_slab) == 1 else torch.from_numpy(rows).to(device)
        writes.append((slab, row_index, torch.from_numpy(columns).to(device)))
        batched = [i for i in members if blocks[i].num_rows <= MAX_BATCHED_ROWS]
        if batched:
            groups.append(_group([blocks[i] for i in batched], [int(first_rows[i]) for i in batched], device))
        groups += [_group([blocks[i]], [int(first_rows[i])], device) for i in members if i not in batched]
    return StepLayout(writes, groups)


def _flat_columns(block: Block) -> npt.NDArray[np.int64]:
    first = block.slot.index * block.slot.capacity + block.start
    return np.arange(first, first + block.num_rows)


def _group(blocks: list[Block], first_rows: list[int], device: torch.device) -> BlockGroup:
    """One attention call for blocks of one slab, over the slots they span (those without a block: padding)."""
    first_slot = min(block.slot.index for block in blocks)
    B = max(block.slot.index for block in blocks) + 1 - first_slot
    R = max(block.num_rows for block in blocks)
    C = max(block.start + block.num_rows for block in blocks)
    row_BR = np.zeros((B, R), dtype=np.int64)
    valid_BR = np.zeros((B, R), dtype=np.bool_)
    visible_BRC = np.zeros((B, R, C), dtype=np.bool_)
    distance_BRC = np.zeros((B, R, C), dtype=np.int32)
    visible_BRC[:, :, 0] = True  # padding must see something: a softmax over nothing is NaN
    for block, first_row in zip(blocks, first_rows, strict=True):
        b, rows, start = block.slot.index - first_slot, block.num_rows, block.start
        row_BR[b, :rows] = np.arange(first_row, first_row + rows)
        valid_BR[b, :rows] = True
        mask_RR = np.tri(rows, dtype=np.bool_) if block.mask_RR is None else block.mask_RR
        visible_BRC[b, :rows, :start] = True
        visible_BRC[b, :rows, start : start + rows] = mask_RR
        key_position_C = np.concatenate([np.arange(start), np.array(block.positions)])
        distance_BRC[b, :rows, : start + rows] = np.array(block.positions)[:, None] - key_position_C
    arrays = (row_BR, row_BR[valid_BR], np.flatnonzero(valid_BR), visible_BRC, distance_BRC)
    return BlockGroup(blocks[0].slot.slab, first_slot, C, *(torch.from_numpy(array).to(device) for array in arrays))


class ModelRunner:
    """One model replica behind the packed step. The model's own code and weights stay as they are."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.device = model.device
        model.set_attn_implementation(ATTENTION_NAME)
        self.kv_shape = self._probe()

    def _probe(self) -> KVShape:
        """One dry forward of one token, to learn what each layer stores and that every layer comes to our attention.

        Raises ConfigError for models whose layers do not: they cannot be served.
        """
        probe = AttentionProbe()
        one = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        with torch.inference_mode():
            self.model(input_ids=one, position_ids=one, use_cache=False, step=probe)
        layers = self.model.config.get_text_config().num_hidden_layers
        kinds = set(probe.shapes.values())
        if len(probe.shapes) != layers or len(kinds) != 1 or any(k != v for _, k, v in kinds):
            raise ConfigError(
                f"model.id must be a model whose {layers} layers all do softmax attention with equal key and value "
                f"heads, got {type(self.model).__name__} with {len(probe.shapes)} such layers of {len(kinds)} kinds"
            )
        if probe.own_mask:
            raise ConfigError(
                f"model.id must be a model that leaves masks to its attention function, got {type(self.model).__name__}"
            )
        ((heads, head_size, _),) = kinds
        return KVShape(layers, heads, head_size, self.model.dtype, self.device)

    @torch.inference_mode()
    def forward(self, blocks: list[Block]) -> Tensor:
        """Logits `[S, V]` after the sampled rows of all blocks, in order; keys and values of all rows are stored."""
        tokens = torch.tensor([[token for block in blocks for token in block.tokens]], device=self.device)
        positions = torch.tensor([[p for block in blocks for p in block.positions]], device=self.device)
        first_rows = np.cumsum([0, *(block.num_rows for block in blocks)])
        sampled = [int(first) + row for first, block in zip(first_rows, blocks, strict=False) for row in block.sampled]
        output = self.model(
            input_ids=tokens,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=torch.tensor(sampled, dtype=torch.int64, device=self.device),
            step=plan_layout(blocks, self.device),
        )
        logits: Tensor = output.logits[0]
        return logits
