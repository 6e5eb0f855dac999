"""How many guesses each sequence gets in a step.

Two questions, asked in this order each step: how many rows may each drafter propose (`windows`), and which of the
proposed nodes are taken (`select`). A policy never changes the output, only the speed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pipeline.config import AutoConfig, Windowed
from workers.drafters.base import Draft

IDLE_ROWS = {"cpu": 16, "cuda": 128}
"""Rows of a step that cost hardly more than one, by device type; for auto `decoding.idle_rows` goes before."""


@dataclass(frozen=True, slots=True)
class StepRoom:
    """Rows of a step: `base_rows` are there anyway (pending tokens, prompt chunks), `free_rows` may be added."""

    base_rows: int
    free_rows: int


class WindowPolicy(Protocol):
    """The seam at which windows are decided. Sequences are named by `DraftContext.key`."""

    def windows(self, keys: Sequence[int], room: StepRoom) -> list[int]:
        """Most draft rows of each decoding sequence."""
        ...

    def select(self, drafts: Sequence[Draft], room: StepRoom) -> list[Draft]:
        """The part of each draft that is bought; with a node always its ancestors."""
        ...

    def observe(self, key: int, draft: Draft, num_accepted: int) -> None:
        """Outcome of one sequence's step: `num_accepted` nodes of `draft` were accepted."""
        ...

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


class AdaptiveWindow:
    """Each sequence's own window, as in the lookahead article: grow while drafts are accepted whole, shrink when
    they break early.

    A draft is whole when its accepted path is as long as its longest branch; it broke early when nothing was
    accepted. In between the window stays. A window never shrinks below the sequence's share of the rows that are idle
    anyway: with few sequences running, guesses cost nothing.
    """

    GROWTH = 1.5
    SHRINKAGE = 0.75

    def __init__(self, config: Windowed, device: torch.device) -> None:
        self._config = config
        self._idle_rows = IDLE_ROWS.get(device.type, IDLE_ROWS["cpu"])
        self._window: dict[int, float] = {}

    def windows(self, keys: Sequence[int], room: StepRoom) -> list[int]:
        sequences = max(1, len(keys))
        most = min(room.free_rows, self._config.max_draft_rows) // sequences
        idle = min(max(0, self._idle_rows - room.base_rows) // sequences, self._config.max_window)
        return [min(max(round(self._current(key)), idle), most) for key in keys]

    def select(self, drafts: Sequence[Draft], room: StepRoom) -> list[Draft]:
        return best_nodes(drafts, room.free_rows)

    def observe(self, key: int, draft: Draft, num_accepted: int) -> None:
        if not len(draft):
            return
        window = self._current(key)
        if num_accepted == max(draft.depths):
            window = window * self.GROWTH + 1
        elif num_accepted == 0:
            window = window * self.SHRINKAGE
        self._window[key] = min(max(window, self._config.min_window), self._config.max_window)

    def finish(self, key: int) -> None:
        self._window.pop(key, None)

    def _current(self, key: int) -> float:
        config = self._config
        return self._window.get(key, (config.min_window + config.max_window) / 2)


class RowCap:
    """The best guesses of all sequences, as many as fit into the rows that are idle anyway.

    A full batch or a prompt chunk leaves none, and the step is plain decoding; a draining batch leaves more and more to
    those that still run. The goodput controller will measure what is a constant here.
    """

    def __init__(self, config: AutoConfig, device: torch.device) -> None:
        self._config = config
        self._idle_rows = config.idle_rows or IDLE_ROWS.get(device.type, IDLE_ROWS["cpu"])

    def windows(self, keys: Sequence[int], room: StepRoom) -> list[int]:
        return [min(self._config.max_window, self._rows(room))] * len(keys)

    def select(self, drafts: Sequence[Draft], room: StepRoom) -> list[Draft]:
        return best_nodes(drafts, self._rows(room))

    def observe(self, key: int, draft: Draft, num_accepted: int) -> None:
        pass

    def finish(self, key: int) -> None:
        pass

    def _rows(self, room: StepRoom) -> int:
        idle = max(0, self._idle_rows - room.base_rows)
        return min(idle, room.free_rows, self._config.max_draft_rows)


def build_policy(config: Windowed, device: torch.device) -> WindowPolicy:
    return RowCap(config, device) if isinstance(config, AutoConfig) else AdaptiveWindow(config, device)
