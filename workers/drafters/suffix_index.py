"""Where a context has occurred before: documents of tokens, found by their last two (or one) tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """An earlier occurrence of the last `length` tokens of a context: `document[position]` followed them.

    `restart` is where reading goes on at the end of the document: the first position of the match when the document
    ends with the context itself (what repeats once may repeat again), else -1.
    """

    document: list[int]
    position: int
    length: int
    restart: int = -1

    @property
    def token(self) -> int:
        return self.document[self.position]

    def after(self) -> Match | None:
        """The match with one more token, None at the end of the document."""
        position = self.position + 1
        if position >= len(self.document):
            if self.restart < 0:
                return None
            position = self.restart
        return Match(self.document, position, self.length + 1, self.restart)


class SuffixIndex:
    """Documents that may grow, with the latest `max_positions` places of each key of one or two tokens.

    Memory is bounded by `max_tokens`: the oldest documents are dropped (0: no bound, for documents that are dropped by
    their owner).
    """

    def __init__(self, key_lengths: tuple[int, ...] = (2, 1), max_positions: int = 16, max_tokens: int = 0) -> None:
        self._key_lengths = key_lengths
        self._max_positions = max_positions
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._documents: dict[int, list[int]] = {}
        self._places: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def __len__(self) -> int:
        """Tokens of all documents."""
        return self._num_tokens

    @property
    def num_documents(self) -> int:
        return len(self._documents)

    @property
    def num_keys(self) -> int:
        return len(self._places)

    def add(self, name: int, tokens: Sequence[int], first: int = 0) -> None:
        """A new document. Places before `first` are not indexed: they are context of what follows only."""
        assert name not in self._documents, name
        self._documents[name] = list(tokens[:first])
        self._num_tokens += min(first, len(tokens))
        self.extend(name, tokens[first:])

    def extend(self, name: int, tokens: Sequence[int]) -> None:
        """Append tokens to a document."""
        document = self._documents[name]
        for token in tokens:
            end = len(document)
            for length in self._key_lengths:
                if length <= end:
                    places = self._places.setdefault(tuple(document[end - length :]), [])
                    places.append((name, end))
                    if len(places) >= 2 * self._max_positions:
                        del places[: -self._max_positions]
            document.append(token)
        self._num_tokens += len(tokens)
        while self._max_tokens and self._num_tokens > self._max_tokens and len(self._documents) > 1:
            self.drop(next(iter(self._documents)))

    def drop(self, name: int) -> None:
        """Forget a document and all its places."""
        document = self._documents.pop(name)
        self._num_tokens -= len(document)
        keys = {
            tuple(document[end - length : end]) for length in self._key_lengths for end in range(length, len(document))
        }
        for key in keys & self._places.keys():
            places = [place for place in self._places[key] if place[0] != name]
            if places:
                self._places[key] = places
            else:
                del self._places[key]

    def matches(self, tokens: Sequence[int], end: int, max_length: int, own: int | None = None) -> list[Match]:
        """Earlier occurrences of the end of `tokens[:end]`, latest first, found by the longest key that occurs.

        `own` names the document that holds `tokens` itself: its matches go round at its end.
        Worked example: after `a b c a b` with key lengths (2, 1), key (a, b) has one place, followed by c: one match of
        length 2 at position 2, which goes on c, a, b, c, a, b, ..
        """
        for length in self._key_lengths:
            places = self._places.get(tuple(tokens[end - length : end])) if length <= min(end, max_length) else None
            if places:
                return [
                    self._match(name, position, tokens, end, length, max_length, own)
                    for name, position in places[: -self._max_positions - 1 : -1]
                ]
        return []

    def _match(
        self, name: int, position: int, tokens: Sequence[int], end: int, known: int, max_length: int, own: int | None
    ) -> Match:
        document = self._documents[name]
        limit = min(max_length, position, end)
        length = known
        while length < limit and document[position - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return Match(document, position, length, position if name == own else -1)
