"""What one sequence contributes to a step: the rows of its block, their positions and who sees whom.

Shape legend: R rows of a block, E hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from workers.drafters.base import Draft, ExtraRows
from workers.kv_cache import Slot


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one sequence in one step: tokens that are not cached yet, then draft nodes, then extra rows.

    Rows are written to columns start, start + 1, ..; row r has position `positions[r]` and sees the columns before
    `start` and the rows that `mask_RR[r]` names (None: causal). Logits are wanted after the rows in `sampled`.

    A block of auxiliary rows (parallel token prediction) has `inputs_RE` in place of tokens. It is causal, but sees
    only the first `seen` columns beside its own rows. It comes after all other blocks, and its keys and values are not
    kept.
    """

    slot: Slot
    start: int
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    mask_RR: npt.NDArray[np.bool_] | None
    sampled: tuple[int, ...]
    inputs_RE: Tensor | None = None
    seen: int | None = None

    @property
    def num_rows(self) -> int:
        return len(self.positions)

    @property
    def columns_seen(self) -> int:
        """Columns that all rows see, beside those of the block."""
        return self.start if self.seen is None else self.seen


def prompt_block(slot: Slot, start: int, tokens: tuple[int, ...], *, sampled: bool) -> Block:
    """A causal chunk of committed tokens; with `sampled`, logits after its last row."""
    positions = tuple(range(start, start + len(tokens)))
    return Block(slot, start, tokens, positions, None, (len(tokens) - 1,) if sampled else ())


def decode_block(slot: Slot, start: int, pending: int, draft: Draft, extra: ExtraRows | None) -> Block:
    """The pending token, the draft tree, and the extra rows of one sequence (see `block_mask`)."""
    if not draft.tokens and extra is None:  # a plain step
        return Block(slot, start, (pending,), (start,), None, (0,))
    tokens = (pending, *draft.tokens)
    positions = (start, *(start + depth for depth in draft.depths))
    sampled = tuple(range(len(tokens)))
    if extra is not None:
        sampled += tuple(len(tokens) + row for row in extra.sampled)
        tokens += extra.tokens
        positions += tuple(start + offset for offset in extra.offsets)
    return Block(slot, start, tokens, positions, block_mask(draft, extra), sampled)


def slot_block(slot: Slot, start: int, seen: int, position: int, inputs_RE: Tensor, sampled: tuple[int, ...]) -> Block:
    """Auxiliary rows of one window at positions `position`, `position` + 1, .. that see each other causally."""
    positions = tuple(range(position, position + len(inputs_RE)))
    return Block(slot, start, (), positions, None, sampled, inputs_RE, seen)


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
