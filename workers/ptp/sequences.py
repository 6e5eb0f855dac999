"""Documents packed to sequences of one length, in an order that a seed decides, and that a saved state goes on with.

Every epoch goes over the units of a source in a new order, and over the documents of a unit in a new order. Sequences
are filled from a pool of documents: the oldest, then the oldest that fits the rest, and so on, which leaves little
padding.

All processes of a data-parallel training read the same sequences and take their share of each batch, so which sequences
make up step n does not depend on how many processes there are.

Shape legend: B sequences, S columns.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


class PackedStream:
    """Endless sequences of `length` tokens. `state()` and `load_state` go on where another stream was, exactly."""

    def __init__(
        self, source: Source, length: int, seed: int, wanted: Wanted, end_token_ids: frozenset[int] = frozenset()
    ) -> None:
        self._source, self._length, self._seed, self._wanted = source, length, seed, wanted
        self._ends = np.asarray(sorted(end_token_ids), np.int64)
        self._epoch = self._unit = self._taken = 0  # the next document: number `taken` of unit `unit` in the order
        self._pool: list[Document] = []
        self._documents: Iterator[Document] | None = None
        self._empty_epochs = 0
        self._order: list[int] = []
        self._order_epoch = -1

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
        """Plain values and tensors."""
        pool = [
            [None if x is None else torch.from_numpy(x.copy()) for x in (part.ids, part.is_target, part.low, part.high)]
            for part in self._pool
        ]
        return {"epoch": self._epoch, "unit": self._unit, "taken": self._taken, "pool": pool}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._unit, self._taken = state["epoch"], state["unit"], state["taken"]
        self._pool = [
            Document(*(None if x is None else x.cpu().numpy() for x in arrays))  # type: ignore[arg-type]
            for arrays in state["pool"]
        ]
        self._documents = None

    def _sequence(self) -> Sequence[Document]:
        chosen: list[Document] = []
        room = self._length
        while True:
            while len(self._pool) < _POOL:
                self._pool += self._next_parts()
            fitting = next((i for i, part in enumerate(self._pool) if len(part) <= room), None)
            if fitting is None:
                return chosen
            chosen.append(self._pool.pop(fitting))
            room -= len(chosen[-1])

    def _next_parts(self) -> list[Document]:
        """The next document, cut to what a sequence holds; parts without a target after their first token are left out.

        Worked example, length 4: 10 tokens become 4 + 4 + 2, or the first 4 alone where edges are stored.
        """
        document = self._next_document()
        stop = len(document) if self._source.splits_long else min(len(document), self._length)
        parts = (document.slice(start, start + self._length) for start in range(0, stop, self._length))
        usable = [part for part in parts if part.is_target[1:].any()]
        if usable:
            self._empty_epochs = 0
        return usable

    def _next_document(self) -> Document:
        while True:
            if self._documents is None:
                self._documents = self._shuffled_unit()
            document = next(self._documents, None)
            if document is not None:
                self._taken += 1
                return document
            self._documents, self._taken = None, 0
            self._unit += 1
            if self._unit == self._source.units:
                self._unit, self._epoch = 0, self._epoch + 1
                self._empty_epochs += 1
                if self._empty_epochs == 2:
                    raise ConfigError("data must hold rows to train on and rows to hold out, got too few rows")

    def _shuffled_unit(self) -> Iterator[Document]:
        if self._order_epoch != self._epoch:
            self._order = list(range(self._source.units))
            random.Random(f"{self._seed} {self._epoch}").shuffle(self._order)
            self._order_epoch = self._epoch
        documents = list(self._source.read(self._order[self._unit], self._wanted))
        random.Random(f"{self._seed} {self._epoch} {self._unit}").shuffle(documents)
        return iter(documents[self._taken :])
