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

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import itemgetter, truediv

from pipeline.decoding_config import AutoConfig, Windowed
from workers.adaptive_window import AdaptiveWindow
from workers.cost_model import CostModel, calibrate
from workers.drafters.base import EMPTY_DRAFT, EMPTY_PROPOSAL, Branch, Draft, Proposal
from workers.latch import Latch
from workers.model_runner import ModelRunner
from workers.window_policy import StepLoad, StepMeasure, StepRoom, WindowPolicy, Windows

_RATE = 0.05
_CHEAP = 1.2
_LEARN_SHARE = 0.002
"""Of the time of steps without drafts, what the drafter may take of them to learn. The candidates that it is shown cost
about as much again."""
_SAFETY = 0.75  # of the last threshold: candidates that score less were not worth a row, and need not be proposed
_PRIOR_ROWS = 20.0  # accepted rows that scores are trusted for before any outcome
_KEPT = 0.995
"""Of the outcomes of bought rows, from one step with drafts to the next: scores that nothing is bought by are trusted
again after some hundred steps."""


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
        self._claimed = self._accepted = 0.0  # rows, by their scores and in truth, the older ones counting ever less

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
        added = sorted({*self._cost.bends(load.room.base_rows, most), min(most, self._config.max_window), most})
        plain_s, *seconds = self._seconds(load, (0, *added))
        rate = sequences / (self._decode_seconds(load, (0,))[0] if load.prompt_rows else plain_s)
        # B rows pay if their accepted tokens, at most B, exceed what plain decoding makes in the time that they take.
        # Between two bends the least of the quotients is at an end.
        yields = [rate * (after - plain_s) / rows for rows, after in zip(added, seconds, strict=True)]
        paying = [rows for rows, least_yield in zip(added, yields, strict=True) if least_yield < 1.0]
        if not paying:
            return Windows([0] * sequences)
        least_score = max(min(yields), _SAFETY * self._threshold) / self._honesty
        return Windows([min(self._config.max_window, paying[-1])] * sequences, least_score)

    def select(self, proposals: Sequence[Proposal], load: StepLoad) -> list[Proposal]:
        honesty = self._honesty
        ranked = _ranked(proposals, [honesty * value for value in load.values])
        most = min(load.room.free_rows, self._config.max_draft_rows, len(ranked))
        seconds = self._seconds(load, range(most + 2))
        alone = self._decode_seconds(load, range(most + 1)) if load.prompt_rows else seconds
        gained = list(accumulate((score for score, _, _ in ranked[:most]), initial=sum(load.values)))
        rate = max(map(truediv, gained, alone))
        surplus = [tokens - rate * s for tokens, s in zip(gained, seconds, strict=False)]
        best = surplus.index(max(surplus))
        self._threshold += 0.2 * (rate * (seconds[best + 1] - seconds[best]) - self._threshold)
        kept: dict[int, list[int]] = {}
        for _, owner, node in ranked[:best]:
            kept.setdefault(owner, []).append(node)
        bought = [p if p is EMPTY_PROPOSAL else _bought(p, kept.get(owner, ())) for owner, p in enumerate(proposals)]
        if any(p.extra_rows for p in bought if p is not EMPTY_PROPOSAL):
            return self._with_paying_extras(bought, load, best, rate)
        return bought

    def observe(self, key: int, draft: Draft, num_accepted: int) -> None:
        self._claimed += sum(draft.scores)
        self._accepted += num_accepted

    def measured(self, step: StepMeasure) -> None:
        load = step.load
        columns = _columns(load) + step.draft_rows * _mean_columns(load)
        self._cost.observe(step.rows, step.sampled_rows, columns, step.forward_s)
        if self._drafting:
            self._claimed *= _KEPT
            self._accepted *= _KEPT
        else:
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

    @property
    def _honesty(self) -> float:
        """What part of the scores of bought rows came true. Where many candidates compete, those that are bought are
        also those whose scores err upwards, however well every kind of them is calibrated."""
        return min(1.0, (self._accepted + _PRIOR_ROWS) / (self._claimed + _PRIOR_ROWS))

    def _rows_are_cheap(self, sequences: int) -> bool:
        """Whether a draft row for every sequence makes the step hardly longer."""
        plain, drafted = (self._cost.seconds(rows, rows, 0) for rows in (sequences, 2 * sequences))
        return drafted < _CHEAP * plain

    def _seconds(self, load: StepLoad, added: Iterable[int]) -> list[float]:
        """Time of the step with so many draft rows."""
        curve = self._cost.curve(load.room.base_rows, added, len(load.keys), _columns(load), _mean_columns(load))
        return [seconds + self._overhead_s[True] for seconds in curve]

    def _decode_seconds(self, load: StepLoad, added: Iterable[int]) -> list[float]:
        """The same if the step held no prompt rows."""
        return self._seconds(replace(load, room=StepRoom(len(load.keys), load.room.free_rows)), added)

    def _with_paying_extras(
        self, proposals: Sequence[Proposal], load: StepLoad, rows: int, rate: float
    ) -> list[Proposal]:
        """Two-dimensional windows and branches are bought as one item each, by what they are expected to yield, the
        best of their rows first. `rows` of drafts are bought already."""
        items: list[tuple[float, int, int, Branch | None]] = []
        for owner, (proposal, value) in enumerate(zip(proposals, load.values, strict=True)):
            if proposal.extra is not None:
                items.append((value * proposal.extra_yield, len(proposal.extra), owner, None))
            items += [(value * branch.gain, len(branch), owner, branch) for branch in proposal.branches]
        most = min(load.room.free_rows, self._config.max_draft_rows)
        bought: dict[int, list[Branch | None]] = {}
        for gain, size, owner, item in sorted(items, key=lambda item: item[0] / item[1], reverse=True):
            if rows + size > most:
                continue
            without_s, with_s = self._seconds(load, (rows, rows + size))
            if gain > rate * (with_s - without_s):
                rows += size
                bought.setdefault(owner, []).append(item)
        return [_with_extras(p, bought.get(owner, [])) if p.extra_rows else p for owner, p in enumerate(proposals)]


def _ranked(proposals: Sequence[Proposal], values: Sequence[float]) -> list[tuple[float, int, int]]:
    """Worth, sequence and index of every proposed node, best first; among equals a parent stays before its child."""
    nodes = [
        (value * score, owner, node)
        for owner, (p, value) in enumerate(zip(proposals, values, strict=True))
        if p is not EMPTY_PROPOSAL
        for node, score in enumerate(p.draft.scores)
    ]
    return sorted(nodes, key=itemgetter(0), reverse=True)


def _bought(proposal: Proposal, nodes: Sequence[int]) -> Proposal:
    """With these nodes of the draft; whether to run its other rows is not decided yet."""
    if proposal.extra is None and not proposal.branches:
        if len(nodes) == len(proposal.draft.tokens):
            return proposal
        if not nodes and not proposal.extra_yield:
            return EMPTY_PROPOSAL
    return proposal.bought(proposal.draft.keep(nodes) if nodes else EMPTY_DRAFT)


def _with_extras(proposal: Proposal, items: Sequence[Branch | None]) -> Proposal:
    """With these branches, and with the two-dimensional window where None is among them."""
    if not items and not len(proposal.draft) and not proposal.extra_yield:
        return EMPTY_PROPOSAL
    branches = tuple([branch for branch in items if branch is not None])
    return replace(proposal, extra=proposal.extra if None in items else None, branches=branches)


def _columns(load: StepLoad) -> float:
    return float(sum(load.columns))


def _mean_columns(load: StepLoad) -> float:
    return sum(load.columns) / max(1, len(load.columns))


def build_policy(config: Windowed, runner: ModelRunner, max_rows: int) -> WindowPolicy:
    """The policy of a strategy; for auto this measures the model for a few seconds."""
    if isinstance(config, AutoConfig):
        return GoodputController(config, CostModel(calibrate(runner, max_rows), stepwise=bool(runner.bucket_edges)))
    return AdaptiveWindow(config, runner.device)
