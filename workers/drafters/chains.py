"""What the drafters share whose guesses carry no probabilities of their own: scores by experience, reproducible
filling.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from workers.drafters.base import Draft, DraftContext, StepOutcome
from workers.drafters.growth import Buckets, Claim

_CLAIM = 0.3  # of a first guess; calibration does the rest
_DEEPEST = 16  # deeper nodes share a bucket
_LAST_RANK = 3  # so do further siblings


def random_of(context: DraftContext) -> random.Random:
    """A generator that depends on the sample and its length alone, so that runs repeat themselves."""
    return random.Random(f"{context.group}/{context.key}/{len(context.tokens)}")


class AcceptanceByDepth:
    """How often a node was accepted when its parent was, by its depth and its rank among its siblings."""

    def __init__(self, drafter: str) -> None:
        self._buckets = Buckets(drafter)

    def scored(self, draft: Draft) -> Draft:
        """The same tree with estimated scores: the product of the acceptance rates along the path."""
        scores: list[float] = []
        for parent, (_, claimed, bucket) in zip(draft.parents, self._claims(draft), strict=True):
            scores.append(bucket.chance(claimed) * (scores[parent] if parent >= 0 else 1.0))
        return replace(draft, scores=tuple(scores))

    def record(self, outcome: StepOutcome) -> None:
        """Grade the nodes below the emitted path: only there it is known what would have been accepted."""
        path = set(outcome.path)
        for parent, (token, claimed, bucket) in zip(outcome.draft.parents, self._claims(outcome.draft), strict=True):
            if parent + 1 in path:
                bucket.record(claimed, token == outcome.picks[parent + 1])

    def _claims(self, draft: Draft) -> Iterator[Claim]:
        """The nodes of a draft as claims that depend on depth and rank alone."""
        siblings: dict[int, int] = {}
        for token, parent, depth in zip(draft.tokens, draft.parents, draft.depths, strict=True):
            rank = siblings[parent] = siblings.get(parent, -1) + 1
            claimed = _CLAIM / (1 + rank)
            buckets = self._buckets.of(min(depth, _DEEPEST), min(rank, _LAST_RANK))
            yield token, claimed, buckets[int(claimed * 4)]
