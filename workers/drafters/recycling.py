"""Recycled continuations (after Token Recycling, Luo et al. 2024): drafts from what past rows computed anyway."""

from __future__ import annotations

from collections.abc import Sequence

from workers.drafters.base import DraftContext, Proposal, StepOutcome
from workers.drafters.continuation_table import Candidates, Context, ContinuationTable
from workers.drafters.frequent_tokens import FrequentTokens
from workers.drafters.growth import NEGLIGIBLE, Buckets, Claim, Grower

CAPACITY = 1 << 17  # contexts in the table: some 60 MB
_TRUST = 0.65  # weight of a longer key against all shorter ones
_OBSERVED = (0.5,)  # probability of what followed a context in a prompt, where the model's own candidates are unknown
_FORESEEN = (0.4,)  # and of what followed it in a lookahead window, whose left part is itself a guess
_LEAST = 0.01  # candidates below this probability are not kept


class RecyclingPredictor:
    """Next-token candidates by the last tokens of the context. The state is the tuple of the last `context` tokens."""

    name = "recycling"

    def __init__(self, top_k: int, context: int, capacity: int = CAPACITY) -> None:
        self._context = context
        self._table = ContinuationTable(capacity)
        self._frequent = FrequentTokens(top_k)
        self._buckets = Buckets(self.name)

    def root(self, context: DraftContext, end: int) -> Context:
        return tuple(context.tokens[max(0, end - self._context) : end])

    def advance(self, state: Context, token: int) -> Context:
        return (*state, token)[-self._context :]

    def probabilities(self, state: Context, least: float = 0.0, weight: float = 1.0) -> tuple[dict[int, float], int]:
        """Interpolated back-off P_n = trust * table_n + (1 - trust) * P_(n-1) over the known keys of n tokens; P_0 are
        the tokens' frequencies. All times `weight`; summands below `least` are left out. Also the length of the longest
        known key."""
        probabilities: dict[int, float] = {}
        longest, rest = 0, weight
        get = self._table.get
        for start in range(len(state)):
            known = get(state[start:])
            if known is None:
                continue
            weight = rest * _TRUST
            rest -= weight
            longest = longest or len(state) - start
            for token, probability in zip(*known, strict=True):
                summand = weight * probability
                if summand < least:
                    break
                probabilities[token] = probabilities.get(token, 0.0) + summand
        for token, probability in self._frequent.probabilities.items():
            summand = rest * probability
            if summand < least:
                break
            probabilities[token] = probabilities.get(token, 0.0) + summand
        return probabilities, longest

    def claims(self, state: Context, least: float) -> list[Claim]:
        probabilities, longest = self.probabilities(state, least * NEGLIGIBLE)
        buckets = self._buckets.of(longest)
        return [(token, p, buckets[int(p * 4)]) for token, p in probabilities.items() if p > least]

    def learn_text(self, tokens: Sequence[int]) -> None:
        """Keep what follows each context of a text, unless the model's own candidates are known there.

        A stand-in for the candidates after prompt rows, which would cost the output layer for every row of the prompt.
        """
        self._stand_in(tokens, _OBSERVED)

    def learn_foreseen(self, ngram: Sequence[int]) -> None:
        """Keep what follows each context of an n-gram of a lookahead window, unless candidates are known there."""
        self._stand_in(ngram, _FORESEEN)

    def foreseen(self, state: Context) -> int | None:
        """The token that a lookahead window foresaw after a context, where nothing better is known."""
        for start in range(len(state)):
            known = self._table.get(state[start:])
            if known is not None:
                return known[0][0] if known[1] is _FORESEEN else None
        return None

    def _stand_in(self, tokens: Sequence[int], probability: tuple[float]) -> None:
        for length in range(1, self._context + 1):
            followers: dict[Context, int] = {}
            for end in range(length, len(tokens)):
                context = tuple(tokens[end - length : end])
                if context not in self._table:
                    followers[context] = tokens[end]
            for context, token in followers.items():
                self._table.store(context, ((token,), probability))

    def learn(self, state: Context, outcome: StepOutcome) -> None:
        """Keep the candidates of all rows of a step; `state` is the context of row 0.

        Rows of the accepted path are stored last: of rows with equal keys, theirs follow the true text.
        """
        contexts = [state]
        for token, parent in zip(outcome.draft.tokens, outcome.draft.parents, strict=True):
            contexts.append(self.advance(contexts[parent + 1], token))
        rows = _candidates(outcome)
        rejected = [row for row in range(len(contexts)) if row not in outcome.path]
        for row in (*rejected, *outcome.path):
            self._table.store_all(contexts[row], rows[row])
        self._frequent.add(outcome.emitted)


def _candidates(outcome: StepOutcome) -> list[Candidates]:
    """The model's candidates after each row, at temperature 1 whatever the sample's own is: how sure the model will be
    after a similar context is another question, and sharper or flatter probabilities drafted no better."""
    assert outcome.topk_tokens_RK is not None
    assert outcome.topk_probs_RK is not None
    rows = []
    for tokens, probs in zip(outcome.topk_tokens_RK.tolist(), outcome.topk_probs_RK.tolist(), strict=True):
        while probs and probs[-1] < _LEAST:
            probs.pop()
        rows.append((tuple(tokens[: len(probs)]), tuple(probs)))
    return rows


class RecyclingDrafter:
    """The recycling predictor alone. Nothing is kept per sample: all samples of a worker share the table."""

    name = RecyclingPredictor.name

    def __init__(self, top_k: int, context: int) -> None:
        self.top_k = top_k
        self._predictor = RecyclingPredictor(top_k, context)
        self._grower = Grower(self._predictor)

    def start(self, context: DraftContext) -> None:
        self._predictor.learn_text(context.tokens)

    def propose(self, contexts: Sequence[DraftContext], max_rows: Sequence[int], min_score: float) -> list[Proposal]:
        return self._grower.propose(contexts, max_rows, min_score)

    def observe(self, context: DraftContext, outcome: StepOutcome) -> None:
        before = self._grower.grade(context, outcome.emitted)
        self._predictor.learn(before, outcome)

    def finish(self, context: DraftContext) -> None:
        """What was learnt stays useful for others."""
        self._grower.forget(context)
