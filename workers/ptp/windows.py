"""Where the training windows of packed token rows lie, and what their slots see (algorithms.md section 8).

A window that starts at column s of a row has L slots; slot l predicts the token of column s + l and stands at the
position of the token before it. Worked example, one row of two documents, window start s = 4, L = 3, context_token:

    column        0  1  2  3  4  5  6  7
    document      0  0  1  1  1  1  1  -1 (padding)
    position      0  1  0  1  2  3  4
    slots                  0  1  2          positions 1, 2, 3; targets: columns 4, 5, 6
    context seen        x                   own document, before the token that slot 0 stands in for ("plain": also 3)

A slot counts while its target and those of all slots before it were sampled in one document, up to an end token.

Shape legend: B rows, S columns, W windows of a row, L slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline.adapter_config import SlotZero

PADDING = -1


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Rows of documents laid end to end, each document in consecutive columns.

    `document_BS` numbers the documents of a row (`PADDING`: no token). `sampled_BS` marks the tokens that the teacher
    chose: assistant turns, with the token that ends them. `ends_BS` marks tokens that end a sample.
    """

    ids_BS: Tensor
    document_BS: Tensor
    sampled_BS: Tensor
    ends_BS: Tensor

    @property
    def position_BS(self) -> Tensor:
        """Column within the document."""
        columns_S = torch.arange(self.document_BS.shape[1], device=self.document_BS.device)
        return columns_S - (columns_S * self._is_first_BS).cummax(-1).values

    @property
    def _is_first_BS(self) -> Tensor:
        is_first_BS = torch.ones_like(self.document_BS, dtype=torch.bool)
        is_first_BS[:, 1:] = self.document_BS[:, 1:] != self.document_BS[:, :-1]
        return is_first_BS


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of packed rows: first target columns (at least 1), slots that count, position ids of slots."""

    start_BW: Tensor
    counts_BWL: Tensor
    position_BWL: Tensor

    @property
    def slots(self) -> int:
        return self.counts_BWL.shape[2]

    def first_slots(self, slots: int) -> Windows:
        """The same windows with fewer slots."""
        return replace(self, counts_BWL=self.counts_BWL[..., :slots], position_BWL=self.position_BWL[..., :slots])

    def of(self, x_BS: Tensor) -> Tensor:
        """The values `[B, W, L]` of a row's columns at the targets of slots; beyond the row, those of the last."""
        columns_BWL = self.start_BW[..., None] + torch.arange(self.slots, device=x_BS.device)
        return _gathered(x_BS, columns_BWL)

    def before(self, x_BS: Tensor) -> Tensor:
        """The values `[B, W]` of a row's columns at the last context token of windows."""
        return _gathered(x_BS, self.start_BW - 1)


def _gathered(x_BS: Tensor, columns: Tensor) -> Tensor:
    flat_BN = columns.flatten(1).clamp(max=x_BS.shape[1] - 1)
    return x_BS.gather(1, flat_BN).view(columns.shape)


def is_start(tokens: PackedTokens) -> Tensor:
    """`[B, S]`: whether a window may start at the column: a sampled token with a context of its own document."""
    return tokens.sampled_BS & (tokens.document_BS != PADDING) & (tokens.position_BS > 0)


def choose_starts(tokens: PackedTokens, windows: int, generator: torch.Generator) -> Tensor:
    """Starts `[B, W]` of at most `windows` different windows, drawn evenly from those possible, in ascending order.

    A row with fewer possible starts than windows gets others too, whose slots do not count.
    """
    possible_BS = is_start(tokens).cpu()
    keys_BS = torch.rand(possible_BS.shape, generator=generator) + possible_BS
    chosen_BW = keys_BS.topk(min(windows, possible_BS.shape[1]), dim=-1).indices
    return chosen_BW.sort(-1).values.clamp(min=1).to(tokens.ids_BS.device)


def make_windows(tokens: PackedTokens, start_BW: Tensor, slots: int) -> Windows:
    """The windows of given starts, each at least 1."""
    columns = tokens.ids_BS.shape[1]
    column_BWL = start_BW[..., None] + torch.arange(slots, device=start_BW.device)
    document_BW1 = _gathered(tokens.document_BS, start_BW - 1)[..., None]
    counts_BWL = (column_BWL < columns) & _gathered(tokens.sampled_BS, column_BWL)
    counts_BWL &= (_gathered(tokens.document_BS, column_BWL) == document_BW1) & (document_BW1 != PADDING)
    counts_BWL[..., 1:] &= ~_gathered(tokens.ends_BS, column_BWL[..., :-1])
    position_BW1 = _gathered(tokens.position_BS, start_BW - 1)[..., None]
    position_BWL = position_BW1 + torch.arange(slots, device=start_BW.device)
    return Windows(start_BW, counts_BWL.long().cumprod(-1).bool(), position_BWL)


def context_mask(tokens: PackedTokens, windows: Windows, slot_zero: SlotZero) -> Tensor:
    """`[B, W, S]`: the context columns that the slots of a window see, before any sliding window."""
    end_BW1 = windows.start_BW[..., None] - (1 if slot_zero == "context_token" else 0)
    column_S = torch.arange(tokens.ids_BS.shape[1], device=end_BW1.device)
    document_BW1 = windows.before(tokens.document_BS)[..., None]
    return (column_S < end_BW1) & (tokens.document_BS[:, None] == document_BW1) & (document_BW1 != PADDING)
