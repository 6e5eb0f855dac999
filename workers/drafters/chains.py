"""What the drafters share whose guesses carry no probabilities of their own: scores by experience, reproducible
filling.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from workers.drafters.base import Draft, DraftContext, StepOutcome
from workers.drafters.growth import Bucket

_PRIOR = 0.3  # acceptance of a first guess, before any was seen
_DEEPEST = 16  # deeper nodes share a bucket
_LAST_RANK = 3  # so do further siblings


def random_of(context: DraftContext) -> random.Random:
    """A generator that depends on the sample and its length alone, so that runs repeat themselves."""
    return random.Random(f"{context.group}/{context.key}/{len(context.tokens)}")


class AcceptanceByDepth:
    """How often a node was accepted when its parent was, by its depth and its rank among its siblings."""

    def __init__(self, drafter: str) -> None:
        self._drafter = drafter
        self._buckets: dict[tuple[int, int], Bucket] = {}

    def scored(self, draft: Draft) -> Draft:
        """The same tree with estimated scores: the product of the acceptance rates along the path."""
        scores: list[float] = []
        for parent, bucket in zip(draft.parents, self._buckets_of(draft), strict=True):
            scores.append(bucket.scale * (scores[parent] if parent >= 0 else 1.0))
        return replace(draft, scores=tuple(scores))

    def record(self, outcome: StepOutcome) -> None:
        """Grade the nodes below the emitted path: only there it is known what would have been accepted."""
        draft, path = outcome.draft, set(outcome.path)
        for token, parent, bucket in zip(draft.tokens, draft.parents, self._buckets_of(draft), strict=True):
            if parent + 1 in path:
                bucket.record(1.0, token == outcome.picks[parent + 1])

    def _buckets_of(self, draft: Draft) -> Iterator[Bucket]:
        siblings: dict[int, int] = {}
        for parent, depth in zip(draft.parents, draft.depths, strict=True):
            rank = siblings[parent] = siblings.get(parent, -1) + 1
            key = (min(depth, _DEEPEST), min(rank, _LAST_RANK))
            if key not in self._buckets:
                self._buckets[key] = Bucket(self._drafter, _PRIOR / (1 + rank))
            yield self._buckets[key]
