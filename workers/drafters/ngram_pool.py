"""The n-gram pool of lookahead decoding."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class NgramPool:
    """Per first token the `candidates` latest continuations of `ngram` - 1 tokens.

    Worked example with ngram 3, candidates 2: after adding (a b c), (a d e), (a b c), (a f g) the continuations of `a`
    are [(f, g), (b, c)]: (d, e) was the one longest unused.
    """

    def __init__(self, ngram: int, candidates: int) -> None:
        assert ngram >= 2, ngram
        assert candidates >= 1, candidates
        self.ngram = ngram
        self.candidates = candidates
        self._continuations: dict[int, OrderedDict[tuple[int, ...], None]] = {}

    def add(self, tokens: Sequence[int]) -> None:
        """Enter one n-gram, or mark it as the latest of its first token."""
        assert len(tokens) == self.ngram, tokens
        latest = self._continuations.setdefault(tokens[0], OrderedDict())
        continuation = tuple(tokens[1:])
        latest[continuation] = None
        latest.move_to_end(continuation)
        if len(latest) > self.candidates:
            latest.popitem(last=False)

    def add_text(self, tokens: Sequence[int]) -> None:
        """Enter every n-gram of a text."""
        for start in range(len(tokens) - self.ngram + 1):
            self.add(tokens[start : start + self.ngram])

    def continuations(self, token: int) -> list[tuple[int, ...]]:
        """What may follow `token`, latest first."""
        return list(reversed(self._continuations.get(token, ())))
