"""Where a context has occurred before: documents of tokens, found by their last two (or one) tokens."""

from __future__ import annotations

from collections.abc import Sequence

Match = tuple[list[int], int, int, int]
"""An earlier occurrence of the last tokens of a context: (document, position, length, restart).

`document[position]` followed the last `length` tokens. `restart` is where reading goes on at the end of the document:
the first position of the match when the document ends with the context itself (what repeats once may repeat again),
else -1. A plain tuple, because a step makes dozens of them.
"""


def followed(matches: Sequence[Match], token: int) -> list[Match]:
    """The matches that foretold `token`, with one more token each; those that end with their document are left out."""
    longer = []
    for document, position, length, restart in matches:
        if document[position] == token:
            position += 1
            if position == len(document):
                if restart < 0:
                    continue
                position = restart
            longer.append((document, position, length + 1, restart))
    return longer


class SuffixIndex:
    """Documents that may grow, with the latest `max_positions` places of each key of one or two tokens.

    Memory is bounded by `max_tokens`: the oldest documents are dropped (0: no bound, for documents that are dropped by
    their owner).
    """

    def __init__(self, key_lengths: tuple[int, ...] = (2, 1), max_positions: int = 8, max_tokens: int = 0) -> None:
        self._key_lengths = key_lengths
        self._max_positions = max_positions
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._documents: dict[int, list[int]] = {}
        self._places: dict[tuple[int, ...], list[tuple[list[int], int]]] = {}  # (document, position of what followed)

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
        self.extend(name, tokens, len(tokens))

    def extend(self, name: int, tokens: Sequence[int], end: int) -> None:
        """Append what `tokens[:end]`, of which the document is a part, has beyond it."""
        document = self._documents[name]
        start = len(document)
        if start >= end:
            return
        for token in tokens[start:end]:
            position = len(document)
            for length in self._key_lengths:
                if length <= position:
                    places = self._places.setdefault(tuple(document[position - length :]), [])
                    places.append((document, position))
                    if len(places) >= 2 * self._max_positions:
                        del places[: -self._max_positions]
            document.append(token)
        self._num_tokens += len(document) - start
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
            places = [place for place in self._places[key] if place[0] is not document]
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
        for known in self._key_lengths:
            places = self._places.get(tuple(tokens[end - known : end])) if known <= min(end, max_length) else None
            if places:
                break
        else:
            return []
        own_document = None if own is None else self._documents[own]
        last = end - 1
        matches = []
        for document, position in places[: -self._max_positions - 1 : -1]:
            limit = min(max_length, position, end)
            length, before = known, position - 1
            while length < limit and document[before - length] == tokens[last - length]:
                length += 1
            matches.append((document, position, length, position if document is own_document else -1))
        return matches
