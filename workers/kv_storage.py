"""The tensors behind a KV cache, and all that happens to them outside of a forward.

Operations name their places by numbers alone. So another process, which holds the keys and values of other heads of the
same model, can repeat them from a journal (see `lockstep`).

Shape legend: L layers, S slots, C columns (positions) of a slot, K key/value heads, D head size, N columns that move.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Concatenate, ParamSpec

import torch
from torch import Tensor

Place = tuple[int, int]
"""A slot: the capacity of its slab, and its index there."""

_P = ParamSpec("_P")


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one position of one sequence takes."""

    layers: int
    heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.heads * self.head_size * self.dtype.itemsize


Operation = tuple[int, str, tuple[object, ...]]
"""Number of a storage, one of its methods, and the arguments of a call."""


@dataclass(frozen=True, slots=True)
class Journal:
    """Takes down the operations of the storage with this number."""

    number: int
    note: Callable[[Operation], None]


def _noted(method: Callable[Concatenate[KVStorage, _P], None]) -> Callable[Concatenate[KVStorage, _P], None]:
    """An operation that goes into the journal once it is done."""

    @functools.wraps(method)
    def noted(self: KVStorage, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        assert not kwargs, "the journal has no names"
        method(self, *args, **kwargs)
        if self.journal is not None:
            self.journal.note((self.journal.number, method.__name__, args))

    return noted


class KVStorage:
    """Slabs by capacity, `[L, 2, S, C, K, D]` (0: keys, 1: values), and kept parts of slots by number,
    `[L, 2, C, K, D]`. What is in use, and how much memory may be taken, is the cache's affair.
    """

    def __init__(self, shape: KVShape, journal: Journal | None = None) -> None:
        self.shape = shape
        self.journal = journal
        self.slabs: dict[int, Tensor] = {}
        self.parts: dict[int, Tensor] = {}

    @_noted
    def resize(self, capacity: int, num_slots: int, kept: int) -> None:
        """Make a slab, or give it another number of slots, of which the first `kept` stay what they are."""
        shape = self.shape
        kv_L2SCKD = torch.zeros(
            shape.layers, 2, num_slots, capacity, shape.heads, shape.head_size, dtype=shape.dtype, device=shape.device
        )
        if kept:
            kv_L2SCKD[:, :, :kept] = self.slabs[capacity][:, :, :kept]
        self.slabs[capacity] = kv_L2SCKD

    @_noted
    def remove(self, capacity: int) -> None:
        """Give up a slab."""
        del self.slabs[capacity]

    @_noted
    def copy(self, source: Place, target: Place, columns: int) -> None:
        """Copy the first columns of one slot to another."""
        (from_capacity, from_index), (to_capacity, to_index) = source, target
        copied_L2CKD = self.slabs[from_capacity][:, :, from_index, :columns]
        self.slabs[to_capacity][:, :, to_index, :columns] = copied_L2CKD

    @_noted
    def move(self, capacity: int, slots: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy columns within their slots, all at once: one gather and one scatter for all layers."""
        slot_N, source_N, target_N = (torch.tensor(x, device=self.shape.device) for x in (slots, sources, targets))
        kv_L2SCKD = self.slabs[capacity]
        kv_L2SCKD[:, :, slot_N, target_N] = kv_L2SCKD[:, :, slot_N, source_N]

    @_noted
    def keep(self, part: int, source: Place, start: int, end: int) -> None:
        """Copy columns [start, end) of a slot to a part of their own."""
        capacity, index = source
        self.parts[part] = self.slabs[capacity][:, :, index, start:end].clone()

    @_noted
    def load(self, part: int, target: Place, start: int) -> None:
        """Copy a part into a slot, from column `start`."""
        capacity, index = target
        kv_L2CKD = self.parts[part]
        self.slabs[capacity][:, :, index, start : start + kv_L2CKD.shape[2]] = kv_L2CKD

    @_noted
    def cut(self, part: int, length: int, first: int) -> None:
        """Cut a part after `length` columns; the first piece gets the number `first`, the second one keeps its own."""
        kv_L2CKD = self.parts[part]  # clones, since a view would keep the whole alive
        self.parts[first] = kv_L2CKD[:, :, :length].clone()
        self.parts[part] = kv_L2CKD[:, :, length:].clone()

    @_noted
    def drop(self, part: int) -> None:
        del self.parts[part]
