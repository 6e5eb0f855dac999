"""The window controller: one global choice of draft rows per step, by expected tokens per second.

Every candidate row v carries S(v), the probability that it is accepted. With R sequences decoding and T0 rows there
anyway, the best B candidates of all sequences are bought, with

    B* = argmax_{B >= 0} (R + S_1 + .. + S_B) / t(T0 + B),    S_1 >= S_2 >= ..

so each sequence's window falls out of one choice. `t` is the cost model, plus a running mean of the time beside the
forward. B = 0 is plain decoding. Whether to draft at all is up to the latch, which believes only what was measured.

A step that also holds prompt rows is judged by the rate r* that the same choice would reach without them: it takes the
B that maximises (R + S_1 + .. + S_B) - r* t(T0 + B). All prompts must be computed some time, so they are no reason to
value time less; the quotient would, and buy rows that save less time later than they cost now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pipeline.config import AutoConfig, Windowed
from workers.adaptive_window import AdaptiveWindow
from workers.cost_model import CostModel, Floats, calibrate
from workers.drafters.base import EMPTY_DRAFT, Draft, Proposal
from workers.latch import Latch
from workers.model_runner import ModelRunner
from workers.window_policy import StepLoad, StepMeasure, StepRoom, WindowPolicy, Windows

_RATE = 0.05
_CHEAP = 1.2
_LEARN_SHARE = 0.004
"""Of the time of steps without drafts, what the drafter may take of them to learn."""
_SAFETY = 0.5  # of the last threshold: candidates that score less were not worth a row, and need not be proposed


class GoodputController:
    """Buys the rows that are worth more than they cost, best first over all sequences."""

    def __init__(self, config: AutoConfig, cost: CostModel) -> None:
        self._config = config
        self._cost = cost
        self._latch = Latch(self._rows_are_cheap)
        self._overhead_s = {True: 0.0, False: 0.0}  # beside the forward, with drafting on and off
        self._drafting = True
        self._learning = True
        self._learn_debt_s = 0.0  # what the last learning step took beyond the share; the steps after it pay it back
        self._threshold = 0.0

    def windows(self, load: StepLoad) -> Windows:
        """Nothing when the latch is off or when not even certain guesses would pay for their rows.

        The drafter goes on learning in some of the steps without drafts: else it would never be better than when it was
        switched off.
        """
        sequences = len(load.keys)
        self._drafting = self._latch.drafting(sequences)
        if not self._drafting:
            self._learning = self._latch.warming_up(sequences) or self._learn_debt_s <= 0.0
            return Windows([0] * sequences, learning=self._learning)
        most = min(load.room.free_rows, self._config.max_draft_rows)
        if not sequences or most <= 0:
            return Windows([0] * sequences)
        seconds = self._seconds(load, most)
        rate = sequences / (self._decode_seconds(load, 0) if load.prompt_rows else seconds)[0]
        # B rows pay if their accepted tokens, at most B, exceed what plain decoding makes in the time that they take.
        least_yield = rate * (seconds[1:] - seconds[0]) / np.arange(1, most + 1)
        paying = np.flatnonzero(least_yield < 1.0)
        if not len(paying):
            return Windows([0] * sequences)
        rows = min(self._config.max_window, int(paying[-1]) + 1)
        return Windows([rows] * sequences, max(float(least_yield.min()), _SAFETY * self._threshold))

    def select(self, proposals: Sequence[Proposal], load: StepLoad) -> list[Proposal]:
        scores, owners = _candidates(proposals, load.values)
        most = min(load.room.free_rows, self._config.max_draft_rows, len(scores))
        order = np.argsort(-scores, kind="stable")[:most]  # stable: a parent stays before a child of equal score
        seconds = self._seconds(load, most + 1)
        alone = self._decode_seconds(load, most) if load.prompt_rows else seconds[: most + 1]
        gained = sum(load.values) + np.concatenate([[0.0], np.cumsum(scores[order])])
        rate = float((gained / alone).max())
        best = int(np.argmax(gained - rate * seconds[: most + 1]))
        self._threshold += 0.2 * (rate * (seconds[best + 1] - seconds[best]) - self._threshold)
        drafts = _kept(proposals, owners, order[:best])
        buys_extra = self._extra_pays(proposals, load, best, rate)
        return [p.bought(draft, extra=buys_extra) for draft, p in zip(drafts, proposals, strict=True)]

    def observe(self, key: int, draft: Draft, num_accepted: int) -> None:
        pass

    def measured(self, step: StepMeasure) -> None:
        load = step.load
        columns = _columns(load) + step.draft_rows * _mean_columns(load)
        self._cost.observe(step.rows, step.sampled_rows, columns, step.forward_s)
        if not self._drafting:
            spent_s = step.draft_s if self._learning else self._learn_debt_s
            self._learn_debt_s = spent_s - _LEARN_SHARE * step.total_s
        overhead_s = self._overhead_s[self._drafting]
        self._overhead_s[self._drafting] += _RATE * (step.total_s - step.forward_s - overhead_s)
        sequences = len(load.keys)
        if sequences and not load.prompt_rows:
            plain_s = self._cost.seconds(sequences, sequences, _columns(load)) + self._overhead_s[False]
            self._latch.record(sequences, self._drafting, step.emitted, step.total_s, sequences / plain_s, load.waiting)

    def finish(self, key: int) -> None:
        pass

    def _rows_are_cheap(self, sequences: int) -> bool:
        """Whether a draft row for every sequence makes the step hardly longer."""
        plain, drafted = (self._cost.seconds(rows, rows, 0) for rows in (sequences, 2 * sequences))
        return drafted < _CHEAP * plain

    def _seconds(self, load: StepLoad, most: int) -> Floats:
        """Time of the step with 0 .. `most` draft rows."""
        curve = self._cost.curve(load.room.base_rows, most, len(load.keys), _columns(load), _mean_columns(load))
        return curve + self._overhead_s[True]

    def _decode_seconds(self, load: StepLoad, most: int) -> Floats:
        """The same if the step held no prompt rows."""
        return self._seconds(replace(load, room=StepRoom(len(load.keys), load.room.free_rows)), most)

    def _extra_pays(self, proposals: Sequence[Proposal], load: StepLoad, bought: int, rate: float) -> bool:
        """Rows of two-dimensional windows and branches are bought as one item, by what they were measured to yield."""
        extra = sum(p.extra_rows for p in proposals)
        if not extra or bought + extra > min(load.room.free_rows, self._config.max_draft_rows):
            return False
        seconds = self._seconds(load, bought + extra)
        extra_yield = sum(p.extra_yield for p in proposals)
        return bool(extra_yield > rate * (seconds[bought + extra] - seconds[bought]))


def _candidates(proposals: Sequence[Proposal], values: Sequence[float]) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Worth `[N]` of every proposed node, sequence after sequence, and the sequence of each."""
    scores = [value * score for p, value in zip(proposals, values, strict=True) for score in p.draft.scores]
    return np.array(scores, dtype=np.float64), np.repeat(np.arange(len(proposals)), [len(p.draft) for p in proposals])


def _kept(proposals: Sequence[Proposal], owners: npt.NDArray[np.int64], bought: npt.NDArray[np.int64]) -> list[Draft]:
    first = np.concatenate([[0], np.cumsum([len(p.draft) for p in proposals])])
    nodes: list[list[int]] = [[] for _ in proposals]
    for candidate in bought.tolist():
        owner = int(owners[candidate])
        nodes[owner].append(candidate - int(first[owner]))
    return [p.draft.keep(kept) if kept else EMPTY_DRAFT for p, kept in zip(proposals, nodes, strict=True)]


def _columns(load: StepLoad) -> float:
    return float(sum(load.columns))


def _mean_columns(load: StepLoad) -> float:
    return sum(load.columns) / max(1, len(load.columns))


def build_policy(config: Windowed, runner: ModelRunner, max_rows: int) -> WindowPolicy:
    """The policy of a strategy; for auto this measures the model for a few seconds."""
    if isinstance(config, AutoConfig):
        return GoodputController(config, CostModel(calibrate(runner, max_rows), stepwise=bool(runner.bucket_edges)))
    return AdaptiveWindow(config, runner.device)
