"""The best of the model-free drafters in one tree: suffix matches and recycled continuations."""

from __future__ import annotations

from workers.drafters.base import DraftContext, Proposal, StepOutcome
from workers.drafters.continuation_table import Context
from workers.drafters.growth import MIN_CLAIM, Buckets, Candidate, grade, grow
from workers.drafters.recycling import RecyclingPredictor
from workers.drafters.suffix import Matches, SuffixPredictor, trust

_TOP_K = 8
_CONTEXT = 3
_MAX_MATCH = 16
_MAX_LENGTH = 8  # longer matches are calibrated together

_State = tuple[Matches, Context]


class _Blend:
    """Both predictors walk together, so that either goes on where the other has led, and a token that both expect gets
    the probability of both. The longer the suffix match, the more weight it has."""

    def __init__(self, suffix: SuffixPredictor, recycling: RecyclingPredictor) -> None:
        self._suffix = suffix
        self._recycling = recycling
        self._buckets = Buckets()

    def root(self, context: DraftContext, end: int) -> _State:
        return self._suffix.root(context, end), self._recycling.root(context, end)

    def advance(self, state: _State, token: int) -> _State:
        return self._suffix.advance(state[0], token), self._recycling.advance(state[1], token)

    def candidates(self, state: _State) -> list[Candidate]:
        """Each token under the name of the predictor that contributes more to its probability."""
        matched, length = self._suffix.probabilities(state[0])
        recycled, key_length = self._recycling.probabilities(state[1])
        weight = trust(length)
        by_suffix = self._buckets.of(self._suffix.name, min(length, _MAX_LENGTH), key_length)
        by_recycling = self._buckets.of(self._recycling.name, min(length, _MAX_LENGTH), key_length)
        candidates = []
        for token in matched | recycled:
            suffix_part = weight * matched.get(token, 0.0)
            recycling_part = (1 - weight) * recycled.get(token, 0.0)
            claimed = suffix_part + recycling_part
            if claimed > MIN_CLAIM:
                buckets = by_suffix if suffix_part > recycling_part else by_recycling
                candidates.append(Candidate(token, claimed, buckets[int(claimed * 4)]))
        return candidates


class AutoDrafter:
    """Suffix and recycling, blended."""

    name = "auto"
    top_k = _TOP_K

    def __init__(self) -> None:
        self._suffix = SuffixPredictor(_MAX_MATCH, use_finished=True)
        self._recycling = RecyclingPredictor(_TOP_K, _CONTEXT)
        self._blend = _Blend(self._suffix, self._recycling)

    def start(self, context: DraftContext) -> None:
        self._suffix.start(context)

    def propose(self, context: DraftContext, max_rows: int) -> Proposal:
        return Proposal(grow(self._blend, self._blend.root(context, len(context.tokens)), max_rows))

    def observe(self, context: DraftContext, outcome: StepOutcome) -> None:
        root = self._blend.root(context, len(context.tokens) - len(outcome.emitted))
        grade(self._blend, root, outcome.emitted)
        self._suffix.extend(context, outcome.emitted)
        self._recycling.learn(root[1], outcome)

    def finish(self, context: DraftContext) -> None:
        self._suffix.finish(context)
