"""What to guess after a context that was never seen: the tokens that come most often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

_UNSEEN = 32  # tokens that are taken to have been something else, so that the first few do not look certain


class FrequentTokens:
    """Counts tokens and keeps the `top_k` most frequent at hand; among equals the one that got there first."""

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self._counts: Counter[int] = Counter()
        self._total = 0
        self._top: list[int] = []
        self.probabilities: dict[int, float] = {}
        """Relative frequencies of the most frequent tokens, with some mass left for all others."""

    def add(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._counts[token] += 1
            self._total += 1
            if token not in self._top:
                self._top.append(token)
            self._top.sort(key=self._counts.__getitem__, reverse=True)
            del self._top[self._top_k :]
        total = self._total + _UNSEEN
        self.probabilities = {token: self._counts[token] / total for token in self._top}
