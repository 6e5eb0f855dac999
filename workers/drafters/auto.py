"""The best of the model-free drafters in one tree: suffix matches and recycled continuations."""

from __future__ import annotations

from workers.drafters.base import DraftContext, Proposal, StepOutcome
from workers.drafters.continuation_table import Context
from workers.drafters.growth import MIN_SCORE, Candidate, grade, grow
from workers.drafters.recycling import RecyclingPredictor
from workers.drafters.suffix import Matches, SuffixPredictor

_State = tuple[Matches, Context]


class _Both:
    """Both predictors walk together, so that either can go on where the other has led."""

    def __init__(self, suffix: SuffixPredictor, recycling: RecyclingPredictor) -> None:
        self._suffix = suffix
        self._recycling = recycling

    def root(self, context: DraftContext, end: int) -> _State:
        return self._suffix.root(context, end), self._recycling.root(context, end)

    def advance(self, state: _State, token: int) -> _State:
        return self._suffix.advance(state[0], token), self._recycling.advance(state[1], token)

    def candidates(self, state: _State) -> list[Candidate]:
        return self._suffix.candidates(state[0]) + self._recycling.candidates(state[1])


class AutoDrafter:
    """Calibrated scores make the claims of the two comparable; each node is named after the one that claimed it
    higher.
    """

    name = "auto"

    def __init__(self, top_k: int = 8, context: int = 2, max_match: int = 16) -> None:
        self.top_k = top_k
        self._suffix = SuffixPredictor(max_match, use_finished=True)
        self._recycling = RecyclingPredictor(top_k, context)
        self._both = _Both(self._suffix, self._recycling)

    def start(self, context: DraftContext) -> None:
        self._suffix.start(context)

    def propose(self, context: DraftContext, max_rows: int) -> Proposal:
        return Proposal(grow(self._both, self._both.root(context, len(context.tokens)), max_rows, MIN_SCORE))

    def observe(self, context: DraftContext, outcome: StepOutcome) -> None:
        before = len(context.tokens) - len(outcome.emitted)
        root = self._both.root(context, before)
        grade(self._both, root, outcome.emitted)
        self._suffix.extend(context, outcome.emitted)
        self._recycling.learn(root[1], outcome)

    def finish(self, context: DraftContext) -> None:
        self._suffix.finish(context)
