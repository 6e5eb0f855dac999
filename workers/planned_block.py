"""A sequence's part of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from workers.blocks import Block, slot_block
from workers.drafters.base import Proposal
from workers.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    """A sequence's part of the step. `proposal` is None for a prompt chunk that ends before the pending token."""

    sequence: Sequence
    block: Block
    proposal: Proposal | None

    @property
    def tree_rows(self) -> int:
        """Sampled rows that may emit: the pending token and the draft nodes (rows beyond only guess)."""
        return 0 if self.proposal is None else 1 + len(self.proposal.draft)

    @property
    def token_indices(self) -> list[int]:
        """Which output token each sampled row predicts."""
        first = self.sequence.context.prompt_length - 1
        return [self.block.positions[row] - first for row in self.block.sampled]


def branch_blocks(item: PlannedBlock) -> Iterator[Block]:
    """The auxiliary blocks of one sequence, in columns behind its own block (they are overwritten in the next step).

    Worked example: the pending token in column 10, drafts b c in 11 and 12; a branch of depth 1 whose window does not
    see the last token of its context (`hidden` 1) sees columns 0..10, and its rows are at positions 11, 12, ..
    """
    block = item.block
    start = block.start + block.num_rows
    for branch in () if item.proposal is None else item.proposal.branches:
        position = block.start + branch.depth
        sampled = tuple(range(1, len(branch)))
        yield slot_block(block.slot, start, position + 1 - branch.hidden, position, branch.inputs_RE, sampled)
        start += len(branch)
