"""What decides how many guesses each sequence gets in a step, and what it is told.

Two questions, asked in this order each step: how many rows may each drafter propose (`windows`), and which of the
proposed nodes are taken (`select`). A policy never changes the output, only the speed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from workers.drafters.base import Draft, Proposal


@dataclass(frozen=True, slots=True)
class StepRoom:
    """Rows of a step: `base_rows` are there anyway (pending tokens, prompt chunks), `free_rows` may be added."""

    base_rows: int
    free_rows: int


@dataclass(frozen=True, slots=True)
class StepLoad:
    """A step before drafts are bought. Decoding sequences are named by `DraftContext.key`.

    `columns[i]` counts the committed columns that a row of sequence i attends to; `values[i]` is what a token of it is
    worth, 1 on average (see `token_values`). `waiting` counts the samples that have not started.
    """

    keys: Sequence[int]
    columns: Sequence[int]
    values: Sequence[float]
    room: StepRoom
    waiting: int = 0

    @property
    def prompt_rows(self) -> int:
        return self.room.base_rows - len(self.keys)


@dataclass(frozen=True, slots=True)
class Windows:
    """Most draft rows of each decoding sequence, and the score below which a row is not worth its time.

    A step without rows costs what plain decoding costs; with `learning` the drafter still sees what came of it.
    """

    rows: list[int]
    min_score: float = 0.0
    learning: bool = True


@dataclass(frozen=True, slots=True)
class StepMeasure:
    """What a step came to: rows by kind, tokens emitted, and seconds (`draft_s`: proposing, choosing and learning)."""

    load: StepLoad
    draft_rows: int
    sampled_rows: int
    emitted: int
    forward_s: float
    draft_s: float
    total_s: float

    @property
    def rows(self) -> int:
        """All rows of the forward."""
        return self.load.room.base_rows + self.draft_rows


class WindowPolicy(Protocol):
    """The seam at which windows are decided."""

    def windows(self, load: StepLoad) -> Windows: ...

    def select(self, proposals: Sequence[Proposal], load: StepLoad) -> list[Proposal]:
        """The part of each proposal that is bought; with a node always its ancestors."""
        ...

    def observe(self, key: int, draft: Draft, num_accepted: int) -> None:
        """Outcome of one sequence's step: `num_accepted` nodes of `draft` were accepted."""
        ...

    def measured(self, step: StepMeasure) -> None: ...

    def finish(self, key: int) -> None: ...


def best_nodes(drafts: Sequence[Draft], rows: int) -> list[Draft]:
    """The `rows` best nodes of all drafts by score, ancestors first.

    Scores never exceed the parent's, and among equals a parent precedes its child, so every prefix of the order is a
    set of trees. Worked example, scores (.8, .5, .2) and (.6,), rows 3: the first draft keeps two nodes, the second
    one.
    """
    if sum(map(len, drafts)) <= rows:
        return list(drafts)
    ranked = ((-score, i, node) for i, draft in enumerate(drafts) for node, score in enumerate(draft.scores))
    kept: list[list[int]] = [[] for _ in drafts]
    for _, i, node in heapq.nsmallest(rows, ranked):
        kept[i].append(node)
    return [draft.keep(nodes) for draft, nodes in zip(drafts, kept, strict=True)]


def token_values(expected_remaining: Sequence[float]) -> list[float]:
    """What a token of each sequence is worth when nobody waits: then the longest ones decide when the tail ends.

    Worked example, 30 and 10 tokens to go: 1.5 and 0.5.
    """
    total = sum(expected_remaining)
    if total <= 0.0:
        return [1.0] * len(expected_remaining)
    return [remaining * len(expected_remaining) / total for remaining in expected_remaining]
