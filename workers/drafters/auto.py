"""The best of the model-free drafters in one tree: suffix matches, recycled continuations, lookahead n-grams."""

from __future__ import annotations

from collections.abc import Sequence

from workers.drafters.base import DraftContext, Proposal, StepOutcome
from workers.drafters.continuation_table import Context
from workers.drafters.growth import NEGLIGIBLE, Buckets, Claim, Grower
from workers.drafters.lookahead_window import LookaheadWindows
from workers.drafters.recycling import CAPACITY, RecyclingPredictor
from workers.drafters.suffix import FINISHED_TOKENS, Matches, SuffixPredictor, trust

_TOP_K = 8
_CONTEXT = 3
_MAX_MATCH = 16
_MAX_LENGTH = 8  # longer matches are calibrated together
_LOOKAHEAD = "lookahead"
_NGRAM = 4  # tokens of the n-grams of a lookahead window
_MEMORY_STEPS = 500.0  # steps with a window after which old ones begin to fade

_State = tuple[Matches, Context]


class _Blend:
    """Both predictors walk together, so that either goes on where the other has led, and a token that both expect gets
    the probability of both. The longer the suffix match, the more weight it has."""

    def __init__(self, suffix: SuffixPredictor, recycling: RecyclingPredictor, with_windows: bool) -> None:
        self._suffix = suffix
        self._recycling = recycling
        self._with_windows = with_windows
        self._by_lookahead = Buckets(_LOOKAHEAD)
        self._by_suffix = Buckets(suffix.name)
        self._by_recycling = Buckets(recycling.name)

    def root(self, context: DraftContext, end: int) -> _State:
        return self._suffix.root(context, end), self._recycling.root(context, end)

    def advance(self, state: _State, token: int) -> _State:
        return self._suffix.advance(state[0], token), self._recycling.advance(state[1], token)

    def claims(self, state: _State, least: float) -> list[Claim]:
        """Each token under the name of the predictor that contributes more to its probability, or of the lookahead
        window when that alone foresaw it."""
        claims = self._blended(state, least)
        foreseen = self._recycling.foreseen(state[1]) if self._with_windows else None
        if foreseen is None:
            return claims
        buckets = self._by_lookahead.of(min(len(state[0]), 1))
        return [
            (token, p, buckets[int(p * 4)] if token == foreseen and bucket.drafter == self._recycling.name else bucket)
            for token, p, bucket in claims
        ]

    def _blended(self, state: _State, least: float) -> list[Claim]:
        matches, context = state
        matched, length = self._suffix.probabilities(matches)
        weight = trust(length)
        recycled, key_length = self._recycling.probabilities(context, least * NEGLIGIBLE, 1.0 - weight)
        length = min(length, _MAX_LENGTH)
        by_recycling = self._by_recycling.of(length, key_length)
        claims = []
        if matched:
            by_suffix = self._by_suffix.of(length, key_length)
            for token, p in matched.items():
                suffix_part = weight * p
                recycling_part = recycled.pop(token, 0.0)
                claimed = suffix_part + recycling_part
                if claimed > least:
                    buckets = by_suffix if suffix_part > recycling_part else by_recycling
                    claims.append((token, claimed, buckets[int(claimed * 4)]))
        for token, claimed in recycled.items():
            if claimed > least:
                claims.append((token, claimed, by_recycling[int(claimed * 4)]))
        return claims


class _WindowYield:
    """How many tokens per step the nodes brought that only windows had foreseen: a fading mean.

    It starts high, so that the window gets tried, and is at home after some hundred steps.
    """

    def __init__(self) -> None:
        self._accepted = 6.0
        self._steps = 20.0

    @property
    def value(self) -> float:
        return self._accepted / self._steps

    def record(self, accepted: int, window_ran: bool) -> None:
        self._accepted += accepted
        self._steps += window_ran
        if self._steps > _MEMORY_STEPS:
            self._accepted /= 2
            self._steps /= 2


class AutoDrafter:
    """Suffix and recycling, blended. With `lookahead_width` > 0 it offers the rows of a lookahead window of so many
    columns; the n-grams found there stand in for recycled candidates that are not known yet."""

    name = "auto"
    top_k = _TOP_K

    def __init__(
        self, lookahead_width: int = 0, capacity: int = CAPACITY, finished_tokens: int = FINISHED_TOKENS
    ) -> None:
        self._suffix = SuffixPredictor(_MAX_MATCH, use_finished=True, finished_tokens=finished_tokens)
        self._recycling = RecyclingPredictor(_TOP_K, _CONTEXT, capacity)
        self._windows = LookaheadWindows(lookahead_width, _NGRAM) if lookahead_width else None
        self._grower = Grower(_Blend(self._suffix, self._recycling, with_windows=lookahead_width > 0))
        self._yield = _WindowYield()

    def start(self, context: DraftContext) -> None:
        self._suffix.start(context)
        if self._windows is not None:
            self._windows.start(context)

    def propose(self, contexts: Sequence[DraftContext], max_rows: Sequence[int], min_score: float) -> list[Proposal]:
        proposals = self._grower.propose(contexts, max_rows, min_score)
        if self._windows is None:
            return proposals
        return [
            Proposal(proposal.draft, self._windows.rows(context), self._yield.value) if rows else proposal
            for proposal, context, rows in zip(proposals, contexts, max_rows, strict=True)
        ]

    def observe(self, context: DraftContext, outcome: StepOutcome) -> None:
        _, before = self._grower.grade(context, outcome.emitted)
        self._suffix.catch_up(context, len(context.tokens))
        self._recycling.learn(before, outcome)
        if self._windows is not None:
            for ngram in self._windows.observe(context, outcome):
                self._recycling.learn_foreseen(ngram)
            accepted = sum(outcome.draft.drafters[row - 1] == _LOOKAHEAD for row in outcome.path[1:])
            self._yield.record(accepted, window_ran=bool(outcome.extra_picks))

    def finish(self, context: DraftContext) -> None:
        self._grower.forget(context)
        self._suffix.finish(context)
        if self._windows is not None:
            self._windows.finish(context)
