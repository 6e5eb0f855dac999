"""Trees grown best-first from a predictor of next tokens, and the calibration of what the predictor claims.

A predictor walks: it has a state for the committed context, claims probabilities for the next token from a state, and
advances a state by a token. `Grower.propose` turns that into a `Draft`; `Grower.grade` compares the claims for every
emitted token with what was emitted, whether or not it was drafted, so that the scores become probabilities.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Generic, Protocol, TypeVar

from workers.drafters.base import EMPTY_DRAFT, EMPTY_PROPOSAL, Draft, DraftContext, Proposal

_MIN_SCORE = 0.0005  # a row that is accepted less often than this is never worth proposing
_MIN_CLAIM = 0.005  # smaller claims cost more time than they win
_MARGIN = 0.5  # claims are looked at down to this part of what would do: calibration may raise them
NEGLIGIBLE = 0.25  # summands of a claim down to this part of the least one of interest are added up
_PRIOR_WEIGHT = 1.0  # a claim is believed until this many expected hits have shown how far it comes true
_MEMORY = 1000.0  # expected hits after which old outcomes begin to fade


@dataclass(slots=True)
class Bucket:
    """Claims of one kind (drafter, match length, ..): how many came true against how many were claimed to.

    `scale` corrects a claimed probability to an observed one. Worked example: 38 claims of 0.5, of which 9 came true,
    give scale = (9 + 1) / (19 + 1) = 0.5, so the next claim of 0.5 scores 0.25. The depth in the tree is no part of the
    kind: it was tried, and claims came true to the same part at all depths.
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

    def chance(self, claimed: float) -> float:
        """How likely a claim comes true."""
        return min(1.0, claimed * self.scale)


class Buckets:
    """Buckets by kind, made when first asked for: one for each quarter of the claimed probability.

    The bucket of a claim is `buckets.of(*kind)[int(claimed * 4)]` (a claim of exactly 1 has its own).
    """

    def __init__(self, drafter: str) -> None:
        self._drafter = drafter
        self._buckets: dict[tuple[int, ...], list[Bucket]] = {}

    def of(self, *kind: int) -> list[Bucket]:
        buckets = self._buckets.get(kind)
        if buckets is None:
            buckets = self._buckets[kind] = [Bucket(self._drafter) for _ in range(5)]
        return buckets


Claim = tuple[int, float, Bucket]
"""A possible next token, the probability that the predictor claims for it, and the bucket that calibrates the claim."""


def grade_chain(chain: Iterable[Claim], emitted: Sequence[int]) -> None:
    """Record which claims of a chain came true, up to the first that did not: what follows it was never judged."""
    for (token, claimed, bucket), true_token in zip(chain, emitted, strict=False):
        bucket.record(claimed, token == true_token)
        if token != true_token:
            return


def likely_chain(chain: Iterable[Claim], chances: Iterable[float], least_score: float, drafter: str) -> Draft:
    """A chain as far as it scores `least_score`; the score of a node is the product of the chances up to it."""
    scores = accumulate(chances, mul)
    kept = [(token, score) for (token, _, _), score in zip(chain, scores, strict=True) if score >= least_score]
    return Draft.chain(tuple(token for token, _ in kept), drafter, tuple(score for _, score in kept))


State = TypeVar("State")


class Predictor(Protocol[State]):
    """Guesses the next token from a state that is a function of the tokens so far."""

    def root(self, context: DraftContext, end: int) -> State:
        """The state after the first `end` tokens of a sample."""
        ...

    def claims(self, state: State, least: float) -> Sequence[Claim]:
        """Possible next tokens that are claimed at more than `least`, each once."""
        ...

    def advance(self, state: State, token: int) -> State:
        """The state after one more token."""
        ...


class Place(Generic[State]):
    """A place of a walk whose claims are known. `children` are the places below it that are known too."""

    __slots__ = ("children", "claims", "state")

    def __init__(self, predictor: Predictor[State], state: State, least: float = _MIN_CLAIM) -> None:
        self.state = state
        self.claims = predictor.claims(state, least)
        self.children: dict[int, Place[State]] = {}

    def child(self, predictor: Predictor[State], token: int, least: float = _MIN_CLAIM) -> Place[State]:
        place = self.children.get(token)
        if place is None:
            place = self.children[token] = Place(predictor, predictor.advance(self.state, token), least)
        return place


def grow(predictor: Predictor[State], root: Place[State], max_rows: int, min_score: float = _MIN_SCORE) -> Draft:
    """The `max_rows` best continuations of the root as a tree, best first, none that scores below `min_score`.

    A node's score is the product of the calibrated probabilities along its path, so parents come before children and
    scores never rise along a path. The frontier holds no more nodes than there are rows left, so most claims end at one
    comparison; the last node is not looked beyond.
    """
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    drafters: list[str] = []
    places: list[Place[State]] = []
    frontier: list[tuple[float, int, int, int, str]] = []  # (score, -arrival, parent, token, drafter), the best last
    arrival, node, score, place = 0, -1, 1.0, root
    while (rows_left := max_rows - len(tokens)) > 0:
        bound = frontier[0][0] if len(frontier) >= rows_left else 0.0
        for token, claimed, bucket in place.claims:
            probability = claimed * bucket.scale
            child_score = score * probability if probability < 1.0 else score
            if child_score >= min_score and child_score > bound:
                arrival -= 1
                insort(frontier, (child_score, arrival, node, token, bucket.drafter))
                if len(frontier) >= rows_left:
                    if len(frontier) > rows_left:
                        del frontier[0]
                    bound = frontier[0][0]
        if not frontier:
            break
        score, _, parent, token, drafter = frontier.pop()
        node = len(tokens)
        tokens.append(token)
        parents.append(parent)
        scores.append(score)
        drafters.append(drafter)
        if rows_left > 1:
            worst = frontier[0][0] if len(frontier) >= rows_left - 1 else min_score
            least = max(worst / score * _MARGIN, _MIN_CLAIM)
            place = (places[parent] if parent >= 0 else root).child(predictor, token, least)
            places.append(place)
    return Draft(tuple(tokens), tuple(parents), tuple(scores), tuple(drafters)) if tokens else EMPTY_DRAFT


def grade(predictor: Predictor[State], root: Place[State], emitted: Sequence[int], least: float = _MIN_CLAIM) -> None:
    """Record for each emitted token which of the predictor's claims (of more than `least`) came true."""
    place = root
    for i, token in enumerate(emitted):
        if i:
            place = place.child(predictor, emitted[i - 1], least)
        for guess, claimed, bucket in place.claims:
            bucket.record(claimed, guess == token)


class Grower(Generic[State]):
    """Proposes and grades for all samples of a drafter.

    What a proposal looked at is kept until its step is graded: along the accepted path nothing is looked up twice.
    """

    def __init__(self, predictor: Predictor[State]) -> None:
        self._predictor = predictor
        self._least = _MIN_CLAIM  # claims of less would not do for the last proposals, nor are they graded
        self._roots: dict[int, tuple[int, Place[State]]] = {}  # by sample: number of tokens, place after them

    def propose(self, contexts: Sequence[DraftContext], max_rows: Sequence[int], min_score: float) -> list[Proposal]:
        floor = max(min_score, _MIN_SCORE)
        self._least = max(floor * _MARGIN, _MIN_CLAIM)
        proposals = []
        for context, rows in zip(contexts, max_rows, strict=True):
            draft = EMPTY_DRAFT
            if rows:
                end = len(context.tokens)
                root = self._place(context, end)
                self._roots[context.key] = end, root
                draft = grow(self._predictor, root, rows, floor)
            proposals.append(EMPTY_PROPOSAL if draft is EMPTY_DRAFT else Proposal(draft))
        return proposals

    def grade(self, context: DraftContext, emitted: Sequence[int]) -> State:
        """Grade the claims for the tokens that a step emitted; returns the state before them."""
        before = len(context.tokens) - len(emitted)
        end, root = self._roots.pop(context.key, (-1, None))
        if root is None or end != before:  # no draft was wanted, or that step went by unobserved
            root = self._place(context, before)
        grade(self._predictor, root, emitted, self._least)
        return root.state

    def forget(self, context: DraftContext) -> None:
        self._roots.pop(context.key, None)

    def _place(self, context: DraftContext, end: int) -> Place[State]:
        return Place(self._predictor, self._predictor.root(context, end), self._least)
