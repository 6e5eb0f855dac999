"""Each sequence's own window, as in the lookahead article: for strategies that a user names."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeline.decoding_config import Windowed
from workers.drafters.base import Draft, Proposal
from workers.window_policy import StepLoad, StepMeasure, Windows, best_nodes

IDLE_ROWS = {"cpu": 8, "cuda": 128}
"""Rows of a step that cost hardly more than one, by device type."""


def idle_rows_of(device: torch.device) -> int:
    return IDLE_ROWS.get(device.type, IDLE_ROWS["cpu"])


class AdaptiveWindow:
    """Grow while drafts are accepted whole, shrink when they break early.

    A draft is whole when its accepted path is as long as its longest branch; it broke early when nothing was
    accepted. In between the window stays. A window never shrinks below the sequence's share of the rows that are idle
    anyway: with few sequences running, guesses cost nothing.
    """

    GROWTH = 1.5
    SHRINKAGE = 0.75

    def __init__(self, config: Windowed, device: torch.device) -> None:
        self._config = config
        self._idle_rows = idle_rows_of(device)
        self._window: dict[int, float] = {}

    def windows(self, load: StepLoad) -> Windows:
        sequences = max(1, len(load.keys))
        most = min(load.room.free_rows, self._config.max_draft_rows) // sequences
        idle = min(max(0, self._idle_rows - load.room.base_rows) // sequences, self._config.max_window)
        return Windows([min(max(round(self._current(key)), idle), most) for key in load.keys])

    def select(self, proposals: Sequence[Proposal], load: StepLoad) -> list[Proposal]:
        drafts = best_nodes([proposal.draft for proposal in proposals], load.room.free_rows)
        return [p.bought(draft) for draft, p in zip(drafts, proposals, strict=True)]

    def observe(self, key: int, draft: Draft, num_accepted: int) -> None:
        if not len(draft):
            return
        window = self._current(key)
        if num_accepted == max(draft.depths):
            window = window * self.GROWTH + 1
        elif num_accepted == 0:
            window = window * self.SHRINKAGE
        self._window[key] = min(max(window, self._config.min_window), self._config.max_window)

    def measured(self, step: StepMeasure) -> None:
        pass

    def finish(self, key: int) -> None:
        self._window.pop(key, None)

    def _current(self, key: int) -> float:
        config = self._config
        return self._window.get(key, (config.min_window + config.max_window) / 2)
