"""Documents packed to sequences of one length, in an order that a seed decides, and that a saved state goes on with.

Every epoch goes over the units of a source in a new order, and over the documents of a unit in a new order. Sequences
are filled from a pool of documents, long ones cut to parts: any part of the pool's documents, then any that fits the
rest, and so on, which leaves little padding. Drawing parts and not documents matters where documents are long: all
sequences of a batch would be parts of one. Parts of an older epoch come first.

All processes of a data-parallel training read the same sequences and take their share of each batch, so which sequences
make up step n does not depend on how many processes there are.

Shape legend: B sequences, S columns.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import ConfigError
from workers.ptp.documents import Document, Source, Wanted
from workers.ptp.windows import PADDING, PackedTokens

_POOL = 64
"""Documents to choose from when a sequence is filled."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """B packed sequences; `low_BS`, `high_BS` are the edges of sampled tokens (see `Document`), None: not known."""

    tokens: PackedTokens
    low_BS: Tensor | None
    high_BS: Tensor | None

    def __len__(self) -> int:
        return len(self.tokens.ids_BS)

    def rows(self, start: int, stop: int) -> Sequences:
        tokens = self.tokens
        return Sequences(
            PackedTokens(
                tokens.ids_BS[start:stop],
                tokens.document_BS[start:stop],
                tokens.sampled_BS[start:stop],
                tokens.ends_BS[start:stop],
            ),
            None if self.low_BS is None else self.low_BS[start:stop],
            None if self.high_BS is None else self.high_BS[start:stop],
        )

    def to(self, device: torch.device) -> Sequences:
        tokens = self.tokens
        moved = (tokens.ids_BS, tokens.document_BS, tokens.sampled_BS, tokens.ends_BS)
        low_BS, high_BS = (None if x is None else x.to(device) for x in (self.low_BS, self.high_BS))
        return Sequences(PackedTokens(*(x.to(device) for x in moved)), low_BS, high_BS)


class _Place(NamedTuple):
    """Where a document is: number `number` of unit `unit`, both in the order of the epoch."""

    epoch: int
    unit: int
    number: int


@dataclass(frozen=True, slots=True)
class _Pooled:
    """A document some of whose parts are left: those that begin at `starts`, in ascending order."""

    place: _Place
    document: Document
    starts: list[int]

    def fitting(self, room: int, length: int) -> int:
        """How many parts fit. All but the last of a document are of full length."""
        if room == length:
            return len(self.starts)
        return int(len(self.document) - self.starts[-1] <= room)


class PackedStream:
    """Endless sequences of `length` tokens. `state()` and `load_state` go on where another stream was, exactly."""

    def __init__(
        self, source: Source, length: int, seed: int, wanted: Wanted, end_token_ids: frozenset[int] = frozenset()
    ) -> None:
        self._source, self._length, self._seed, self._wanted = source, length, seed, wanted
        self._ends = np.asarray(sorted(end_token_ids), np.int64)
        self._next = _Place(0, 0, 0)
        self._made = 0
        self._pool: list[_Pooled] = []
        self._empty_epochs = 0
        self._order: tuple[int, list[int]] = (-1, [])
        self._unit: tuple[int, list[Document]] = (-1, [])
        self._shuffled: tuple[tuple[int, int], list[Document]] = ((-1, -1), [])

    def take(self, count: int) -> Sequences:
        """The next `count` sequences. Raises ConfigError where the source has no document that can be trained on."""
        packed = [self._sequence() for _ in range(count)]
        shape = (count, self._length)
        ids, document = np.zeros(shape, np.int64), np.full(shape, PADDING, np.int64)
        sampled = np.zeros(shape, np.bool_)
        low, high = np.full(shape, np.nan), np.full(shape, np.nan)
        for b, documents in enumerate(packed):
            at = 0
            for number, part in enumerate(documents):
                columns = slice(at, at + len(part))
                ids[b, columns], document[b, columns], sampled[b, columns] = part.ids, number, part.is_target
                if part.low is not None and part.high is not None:
                    low[b, columns], high[b, columns] = part.low, part.high
                at += len(part)
        ends = sampled & np.isin(ids, self._ends)
        tokens = PackedTokens(*(torch.from_numpy(x) for x in (ids, document, sampled, ends)))
        if not self._source.has_edges:
            return Sequences(tokens, None, None)
        return Sequences(tokens, torch.from_numpy(low), torch.from_numpy(high))

    def state(self) -> dict[str, Any]:
        """Plain values: where documents are, not what they hold."""
        pool = [(tuple(pooled.place), list(pooled.starts)) for pooled in self._pool]
        return {"next": tuple(self._next), "made": self._made, "pool": pool}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._next, self._made = _Place(*state["next"]), state["made"]
        places = [_Place(*place) for place, _ in state["pool"]]
        found = {place: self._documents(place.epoch, place.unit)[place.number] for place in sorted(places)}
        self._pool = [
            _Pooled(place, found[place], list(starts)) for place, (_, starts) in zip(places, state["pool"], strict=True)
        ]

    def _sequence(self) -> Sequence[Document]:
        generator = random.Random(f"{self._seed} {self._made}")
        self._made += 1
        chosen: list[Document] = []
        room = self._length
        while True:
            while len(self._pool) < _POOL:
                self._add_document()
            part = self._drawn(room, generator)
            if part is None:
                return chosen
            chosen.append(part)
            room -= len(part)

    def _drawn(self, room: int, generator: random.Random) -> Document | None:
        """One of the parts that fit, of the oldest epoch that has some, taken from the pool."""
        counts = [pooled.fitting(room, self._length) for pooled in self._pool]
        epochs = [pooled.place.epoch for pooled, count in zip(self._pool, counts, strict=True) if count]
        if not epochs:
            return None
        oldest = min(epochs)
        weights = [count * (pooled.place.epoch == oldest) for pooled, count in zip(self._pool, counts, strict=True)]
        (index,) = generator.choices(range(len(weights)), weights)
        pooled = self._pool[index]
        number = generator.randrange(len(pooled.starts)) if room == self._length else -1
        start = pooled.starts.pop(number)
        if not pooled.starts:
            del self._pool[index]
        return pooled.document.slice(start, start + self._length)

    def _add_document(self) -> None:
        """Put the next document into the pool, cut to what a sequence holds.

        Worked example, length 4: 10 tokens become 4 + 4 + 2, or the first 4 alone where edges are stored. Parts without
        a target after their first token are left out.
        """
        place, document = self._next_document()
        if not self._source.splits_long:
            document = document.slice(0, self._length)
        starts = range(0, len(document), self._length)
        usable = [start for start in starts if document.is_target[start + 1 : start + self._length].any()]
        if usable:
            self._empty_epochs = 0
            self._pool.append(_Pooled(place, document, usable))

    def _next_document(self) -> tuple[_Place, Document]:
        while True:
            place = self._next
            documents = self._documents(place.epoch, place.unit)
            if place.number < len(documents):
                self._next = place._replace(number=place.number + 1)
                return place, documents[place.number]
            self._next = _Place(place.epoch, place.unit + 1, 0)
            if self._next.unit == self._source.units:
                self._next = _Place(place.epoch + 1, 0, 0)
                self._empty_epochs += 1
                if self._empty_epochs == 2:
                    raise ConfigError("data must hold rows to train on and rows to hold out, got too few rows")

    def _documents(self, epoch: int, unit: int) -> list[Document]:
        """The documents of unit number `unit` of an epoch, in the order of the epoch."""
        if self._shuffled[0] == (epoch, unit):
            return self._shuffled[1]
        if self._order[0] != epoch:
            order = list(range(self._source.units))
            random.Random(f"{self._seed} {epoch}").shuffle(order)
            self._order = (epoch, order)
        number = self._order[1][unit]
        if self._unit[0] != number:
            self._unit = (number, list(self._source.read(number, self._wanted)))
        documents = list(self._unit[1])
        random.Random(f"{self._seed} {epoch} {unit}").shuffle(documents)
        self._shuffled = ((epoch, unit), documents)
        return documents
