"""Recycled continuations (after Token Recycling, Luo et al. 2024): drafts from what past rows computed anyway."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workers.drafters.base import DraftContext, Proposal, StepOutcome
from workers.drafters.continuation_table import Context, ContinuationTable
from workers.drafters.frequent_tokens import FrequentTokens
from workers.drafters.growth import MIN_CLAIM, Buckets, Candidate, grade, grow

_CAPACITY = 1 << 17  # contexts in the table: some 40 MB with top_k 8
_TRUST = 0.65  # weight of a longer key against all shorter ones
_OBSERVED = 0.5  # probability of what followed a context in a prompt, where the model's own candidates are not known


class RecyclingPredictor:
    """Next-token candidates by the last tokens of the context. The state is the tuple of the last `context` tokens."""

    name = "recycling"

    def __init__(self, top_k: int, context: int, capacity: int = _CAPACITY) -> None:
        self._top_k = top_k
        self._context = context
        self._table = ContinuationTable(top_k, capacity)
        self._frequent = FrequentTokens(top_k)
        self._buckets = Buckets()

    def root(self, context: DraftContext, end: int) -> Context:
        """The state after the first `end` tokens of a sample."""
        return tuple(context.tokens[max(0, end - self._context) : end])

    def advance(self, state: Context, token: int) -> Context:
        return (*state, token)[-self._context :]

    def probabilities(self, state: Context) -> tuple[dict[int, float], int]:
        """Interpolated back-off P_n = trust * table_n + (1 - trust) * P_(n-1) over the known keys of n tokens; P_0 are
        the tokens' frequencies. Also the length of the longest known key."""
        probabilities: dict[int, float] = {}
        longest, rest = 0, 1.0
        for start in range(len(state)):
            known = self._table.get(state[start:])
            if known is None:
                continue
            longest = longest or len(state) - start
            weight = rest * _TRUST
            rest -= weight
            for token, probability in zip(*known, strict=True):
                probabilities[token] = probabilities.get(token, 0.0) + weight * probability
        for token, probability in self._frequent.probabilities.items():
            probabilities[token] = probabilities.get(token, 0.0) + rest * probability
        return probabilities, longest

    def candidates(self, state: Context) -> list[Candidate]:
        probabilities, longest = self.probabilities(state)
        buckets = self._buckets.of(self.name, longest)
        return [Candidate(token, p, buckets[int(p * 4)]) for token, p in probabilities.items() if p > MIN_CLAIM]

    def learn_text(self, tokens: Sequence[int]) -> None:
        """Keep what follows each context of a text, unless the model's own candidates are known there.

        A stand-in for the candidates after prompt rows, which would cost the output layer for every row of the prompt.
        """
        for length in range(1, self._context + 1):
            followers: dict[Context, int] = {}
            for end in range(length, len(tokens)):
                context = tuple(tokens[end - length : end])
                if context not in self._table:
                    followers[context] = tokens[end]
            tokens_RK = np.zeros((len(followers), self._top_k), np.int64)
            probs_RK = np.zeros((len(followers), self._top_k), np.float32)
            tokens_RK[:, 0] = list(followers.values())
            probs_RK[:, 0] = _OBSERVED
            self._table.store(list(followers), tokens_RK, probs_RK)

    def learn(self, state: Context, outcome: StepOutcome) -> None:
        """Keep the candidates of all rows of a step; `state` is the context of row 0.

        Rows of the accepted path are stored last: of rows with equal keys, theirs follow the true text.
        """
        assert outcome.topk_tokens_RK is not None
        assert outcome.topk_probs_RK is not None
        states = [state]
        for token, parent in zip(outcome.draft.tokens, outcome.draft.parents, strict=True):
            states.append(self.advance(states[parent + 1], token))
        accepted = set(outcome.path)
        rows = [row for row in range(len(states)) if row not in accepted] + list(outcome.path)
        tokens_RK, probs_RK = outcome.topk_tokens_RK[rows], outcome.topk_probs_RK[rows]
        for length in range(1, self._context + 1):
            self._table.store([states[row][-length:] for row in rows], tokens_RK, probs_RK)
        self._frequent.add(outcome.emitted)


class RecyclingDrafter:
    """The recycling predictor alone. Nothing is kept per sample: all samples of a worker share the table."""

    name = RecyclingPredictor.name

    def __init__(self, top_k: int, context: int) -> None:
        self.top_k = top_k
        self._predictor = RecyclingPredictor(top_k, context)

    def start(self, context: DraftContext) -> None:
        self._predictor.learn_text(context.tokens)

    def propose(self, context: DraftContext, max_rows: int) -> Proposal:
        return Proposal(grow(self._predictor, self._predictor.root(context, len(context.tokens)), max_rows))

    def observe(self, context: DraftContext, outcome: StepOutcome) -> None:
        root = self._predictor.root(context, len(context.tokens) - len(outcome.emitted))
        grade(self._predictor, root, outcome.emitted)
        self._predictor.learn(root, outcome)

    def finish(self, context: DraftContext) -> None:
        """All of it stays useful for others."""
