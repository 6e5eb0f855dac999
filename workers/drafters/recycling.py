"""Recycled continuations (after Token Recycling, Luo et al. 2024): drafts from candidates that past rows computed
anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

from workers.drafters.base import DraftContext, Proposal, StepOutcome
from workers.drafters.continuation_table import Context, ContinuationTable
from workers.drafters.growth import MIN_SCORE, Bucket, Candidate, grade, grow

_CAPACITY = 1 << 17  # contexts: some 30 MB with top_k 8
_PRIORS = (0.5, 1.0)  # how far claims are trusted before any outcome: shortest key, longer keys


class RecyclingPredictor:
    """Next-token candidates by the last tokens: the longest known key first, filled up from shorter keys.

    The state is the tuple of the last `context` tokens.
    """

    def __init__(self, top_k: int, context: int, capacity: int = _CAPACITY) -> None:
        self._table = ContinuationTable(top_k, capacity)
        self._context = context
        self._buckets: dict[tuple[int, int, int], Bucket] = {}

    def root(self, context: DraftContext, end: int) -> Context:
        return tuple(context.tokens[max(0, end - self._context) : end])

    def advance(self, state: Context, token: int) -> Context:
        return (*state, token)[-self._context :]

    def candidates(self, state: Context) -> list[Candidate]:
        found: list[Candidate] = []
        seen: set[int] = set()
        best_order = 0
        for start in range(len(state)):
            known = self._table.get(state[start:])
            if known is None:
                continue
            order = len(state) - start
            best_order = best_order or order
            for token, probability in zip(*known, strict=True):
                if token not in seen:
                    seen.add(token)
                    found.append(Candidate(token, probability, self._bucket(order, best_order, probability)))
        return found

    def learn(self, state: Context, outcome: StepOutcome) -> None:
        """Keep the candidates of all rows; `state` is the context of row 0. Rows of the accepted path are stored last,
        since they alone are known to be on the true continuation."""
        assert outcome.topk_tokens_RK is not None and outcome.topk_probs_RK is not None
        states = [state]
        for token, parent in zip(outcome.draft.tokens, outcome.draft.parents, strict=True):
            states.append(self.advance(states[parent + 1], token))
        accepted = set(outcome.path)
        rows = [row for row in range(len(states)) if row not in accepted] + list(outcome.path)
        for length in range(1, self._context + 1):
            keys = [states[row][-length:] for row in rows]
            self._table.store(keys, outcome.topk_tokens_RK[rows], outcome.topk_probs_RK[rows])

    def _bucket(self, order: int, best_order: int, probability: float) -> Bucket:
        key = (order, best_order, int(probability * 8))
        bucket = self._buckets.get(key)
        if bucket is None:
            prior = _PRIORS[order > 1] if order == best_order else 0.1
            bucket = self._buckets[key] = Bucket("recycling", prior)
        return bucket


class RecyclingDrafter:
    """The recycling predictor alone."""

    name = "recycling"

    def __init__(self, top_k: int, context: int) -> None:
        self.top_k = top_k
        self._predictor = RecyclingPredictor(top_k, context)

    def start(self, context: DraftContext) -> None:
        """Nothing is kept per sample: all samples share the table."""

    def propose(self, context: DraftContext, max_rows: int) -> Proposal:
        return Proposal(grow(self._predictor, self._predictor.root(context, len(context.tokens)), max_rows, MIN_SCORE))

    def observe(self, context: DraftContext, outcome: StepOutcome) -> None:
        root = self._predictor.root(context, len(context.tokens) - len(outcome.emitted))
        grade(self._predictor, root, outcome.emitted)
        self._predictor.learn(root, outcome)

    def finish(self, context: DraftContext) -> None:
        """Nothing to free."""
