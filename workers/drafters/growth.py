"""Trees grown best-first from a predictor of next tokens, and the calibration of what the predictor claims.

A predictor walks: it has a state for the committed context, proposes candidates for the next token from a state, and
advances a state by a token. `grow` turns that into a `Draft`; `grade` compares the candidates of every emitted token
with what was emitted, whether or not they were part of a draft, so that the scores become probabilities.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from workers.drafters.base import Draft, TreeBuilder

_MIN_SCORE = 0.0005  # a row that is accepted less often than this is not worth proposing
MIN_CLAIM = 0.005
_PRIOR_WEIGHT = 4.0  # a claim is believed until this many expected hits have shown how far it comes true
_MEMORY = 1000.0  # expected hits after which old outcomes begin to fade


@dataclass(slots=True)
class Bucket:
    """Candidates of one kind (drafter, match length, ..): how many came true against how many were claimed to.

    `scale` corrects a claimed probability to an observed one. Worked example: 40 candidates claimed at 0.5, of which 8
    came true, give scale = (8 + 4) / (20 + 4) = 0.5, so the next claim of 0.5 scores 0.25.
    """

    drafter: str
    hits: float = 0.0
    expected: float = 0.0
    scale: float = 1.0

    def record(self, claimed: float, hit: bool) -> None:
        self.expected += claimed
        self.hits += hit
        if self.expected > _MEMORY:
            self.expected /= 2
            self.hits /= 2
        self.scale = (self.hits + _PRIOR_WEIGHT) / (self.expected + _PRIOR_WEIGHT)


class Buckets:
    """Buckets by drafter and kind, made when first asked for: one for each quarter of the claimed probability.

    The bucket of a claim is `buckets.of(drafter, *kind)[int(claimed * 4)]` (a claim of exactly 1 has its own).
    """

    def __init__(self) -> None:
        self._buckets: dict[tuple[str | int, ...], list[Bucket]] = {}

    def of(self, drafter: str, *kind: int) -> list[Bucket]:
        key: tuple[str | int, ...] = (drafter, *kind)
        buckets = self._buckets.get(key)
        if buckets is None:
            buckets = self._buckets[key] = [Bucket(drafter) for _ in range(5)]
        return buckets


class Candidate(NamedTuple):
    """A possible next token with the probability that the predictor claims for it, before calibration."""

    token: int
    claimed: float
    bucket: Bucket

    @property
    def probability(self) -> float:
        return min(1.0, self.claimed * self.bucket.scale)


State = TypeVar("State")


class Predictor(Protocol[State]):
    """Guesses the next token from a state that is a function of the tokens so far."""

    def candidates(self, state: State) -> Sequence[Candidate]:
        """Possible next tokens, each once. What is claimed below `MIN_CLAIM` is better left out: it costs more time
        than it wins."""
        ...

    def advance(self, state: State, token: int) -> State:
        """The state after one more token."""
        ...


def grow(predictor: Predictor[State], root: State, max_rows: int, min_score: float = _MIN_SCORE) -> Draft:
    """The `max_rows` best continuations of the root as a tree, best first, none that scores below `min_score`.

    A node's score is the product of the probabilities along its path, so parents come before children and scores never
    rise along a path.
    """
    tree = TreeBuilder()
    states: list[State] = []
    heap: list[tuple[float, int, int, int, str]] = []  # (-score, arrival, parent, token, drafter)
    arrivals = 0
    parent, state, score = -1, root, 1.0
    while len(tree.tokens) < max_rows:
        for candidate in predictor.candidates(state):
            child_score = score * candidate.probability
            if child_score >= min_score:
                heapq.heappush(heap, (-child_score, arrivals, parent, candidate.token, candidate.bucket.drafter))
                arrivals += 1
        if not heap:
            break
        negative, _, grandparent, token, drafter = heapq.heappop(heap)
        score = -negative
        parent = tree.add(grandparent, token, score, drafter)
        state = predictor.advance(states[grandparent] if grandparent >= 0 else root, token)
        states.append(state)
    return tree.build()


def grade(predictor: Predictor[State], root: State, emitted: Sequence[int]) -> None:
    """Record for each emitted token which of the predictor's candidates came true."""
    state = root
    for token in emitted:
        for candidate in predictor.candidates(state):
            candidate.bucket.record(candidate.claimed, candidate.token == token)
        state = predictor.advance(state, token)
