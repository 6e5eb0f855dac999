"""What to guess after a context that was never seen: the tokens that come most often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

_UNSEEN = 32  # tokens that are taken to have been something else, so that the first few do not look certain


class FrequentTokens:
    """Counts tokens and keeps the `top_k` most frequent at hand; among equals the one that got there first."""

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self._counts: Counter[int] = Counter()
        self._total = 0
        self._added: list[int] = []  # since the top was last asked for: a step adds for every sequence, then asks
        self._probabilities: dict[int, float] = {}

    @property
    def probabilities(self) -> dict[int, float]:
        """Relative frequencies of the most frequent tokens, with some mass left for all others."""
        if self._added:
            candidates = dict.fromkeys([*self._probabilities, *self._added])
            top = sorted(candidates, key=self._counts.__getitem__, reverse=True)[: self._top_k]
            total = self._total + _UNSEEN
            self._probabilities = {token: self._counts[token] / total for token in top}
            self._added.clear()
        return self._probabilities

    def add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._counts[token] += 1
        self._total += len(tokens)
        self._added += tokens
