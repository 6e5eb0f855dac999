"""Storage of keys and values: slabs of equal slots, one slab per power-of-two capacity.

A sequence owns one slot and moves to the next slab when it outgrows it (amortised constant cost per token). Slots in
use are always the first ones of their slab, so attention over all sequences of a slab reads one contiguous view,
without a gather and with less than half of it padding. All layers live in one tensor, so that committing accepted
rows, moving a slot or copying a prompt is one operation, not one per layer.

Shape legend: L layers, S slots, C columns (positions) of a slot, K key/value heads, D head size (see `kv_storage`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeline.config import EngineConfig
from workers.kv_storage import Journal, KVShape, KVStorage, Place

MIN_CAPACITY = 128


@dataclass(slots=True, eq=False)
class Slot:
    """One sequence's place: row `index` of `slab`, of which the first `used` columns hold committed tokens.

    The index changes when another slot is freed.
    """

    slab: Slab
    index: int
    used: int = 0

    @property
    def capacity(self) -> int:
        return self.slab.capacity

    @property
    def place(self) -> Place:
        return self.slab.capacity, self.index


@dataclass(slots=True, eq=False)
class Slab:
    """Slots of one capacity. `kv_L2SCKD[l, 0]` holds the keys of layer l, `[l, 1]` its values."""

    capacity: int
    storage: KVStorage
    slots: list[Slot] = field(default_factory=list)

    @property
    def kv_L2SCKD(self) -> Tensor:
        return self.storage.slabs[self.capacity]

    @property
    def num_allocated(self) -> int:
        return self.kv_L2SCKD.shape[2]


@dataclass(frozen=True, slots=True)
class Move:
    """Rows of an accepted path that must move: in `slot`, column `source[i]` to column `target[i]`."""

    slot: Slot
    source: tuple[int, ...]
    target: tuple[int, ...]


def commit_move(slot: Slot, start: int, path: Sequence[int]) -> Move | None:
    """The move that puts a path's rows behind `start` in order; None for a chain, which is in order already.

    Row r of the step was written to column start + r. Worked example: start 10, path (0, 1, 3): row 3 goes to column
    12.
    """
    pairs = [(start + row, start + i) for i, row in enumerate(path) if row != i]
    if not pairs:
        return None
    source, target = zip(*pairs, strict=True)
    return Move(slot, source, target)


def budget_bytes(engine: EngineConfig, device: torch.device) -> int:
    """Memory for keys and values: what the job says, else a quarter of the machine's RAM (CPU) or 80 % of what the
    model left free (CUDA)."""
    if engine.kv_memory_gb is not None:
        return int(engine.kv_memory_gb * 2**30)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(0.8 * free)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


class KVCache:
    """All slabs of one model replica, within a budget of bytes, of which `reserved_bytes` are used outside of slabs.

    A slot that is the only one may take up to `limit_bytes`, if that is more: what was served alone before the budget
    was cut still is.
    """

    def __init__(
        self, shape: KVShape, budget_bytes: int, max_slots: int, limit_bytes: int = 0, journal: Journal | None = None
    ) -> None:
        self.shape = shape
        self.storage = KVStorage(shape, journal)
        self.budget_bytes = budget_bytes
        self.limit_bytes = max(limit_bytes, budget_bytes)
        self.max_slots = max_slots
        self.reserved_bytes = 0
        self.slabs: dict[int, Slab] = {}

    @property
    def allocated_bytes(self) -> int:
        return sum(slab.num_allocated * self._slot_bytes(slab.capacity) for slab in self.slabs.values())

    @property
    def used_bytes(self) -> int:
        return sum(len(slab.slots) * self._slot_bytes(slab.capacity) for slab in self.slabs.values())

    @property
    def usage(self) -> float:
        """The part of the budget that slots and kept prefixes use. Any thread may ask."""
        slabs = tuple(self.slabs.values())
        used = sum(len(slab.slots) * self._slot_bytes(slab.capacity) for slab in slabs)
        return (used + self.reserved_bytes) / self.budget_bytes

    @property
    def free_bytes(self) -> int:
        """What neither slabs nor anything else has taken of the budget."""
        return self.budget_bytes - self.allocated_bytes - self.reserved_bytes

    def fits_alone(self, columns: int) -> bool:
        """Whether a sequence of so many columns could ever be served, with nothing else running."""
        return self._slot_bytes(self._capacity_for(columns)) <= self.limit_bytes

    def allocate(self, columns: int) -> Slot | None:
        """A slot of at least so many columns; None when the budget is spent."""
        capacity = self._capacity_for(columns)
        slab = self.slabs.get(capacity)
        if slab is None or len(slab.slots) == slab.num_allocated:
            slab = self._enlarge(capacity)
            if slab is None:
                return None
        slot = Slot(slab, len(slab.slots))
        slab.slots.append(slot)
        return slot

    def free(self, slot: Slot) -> None:
        """Give a slot back; the slab's last slot moves into the hole."""
        slab = slot.slab
        last = slab.slots.pop()
        if last is slot:
            return
        slab.slots[slot.index] = last
        self.storage.copy(last.place, slot.place, last.used)
        last.index = slot.index

    def copy(self, source: Slot, target: Slot, columns: int) -> None:
        """Copy the first columns of one slot to another: a prompt shared by samples, or a sequence that grew."""
        assert columns <= source.used
        target.used = columns
        self.storage.copy(source.place, target.place, columns)

    def commit(self, moves: Sequence[Move]) -> None:
        """Put the rows of accepted paths in order, all sequences of a slab at once."""
        by_slab: dict[int, list[Move]] = {}
        for move in moves:
            by_slab.setdefault(move.slot.capacity, []).append(move)
        for capacity, slab_moves in by_slab.items():
            slots = [m.slot.index for m in slab_moves for _ in m.source]
            sources = [column for m in slab_moves for column in m.source]
            targets = [column for m in slab_moves for column in m.target]
            self.storage.move(capacity, slots, sources, targets)

    def _capacity_for(self, columns: int) -> int:
        return max(MIN_CAPACITY, 1 << (columns - 1).bit_length())

    def _slot_bytes(self, capacity: int) -> int:
        return capacity * self.shape.bytes_per_token

    def _enlarge(self, capacity: int) -> Slab | None:
        """Room for at least one more slot in a slab: twice as many where the budget allows, else as many as it does.

        Idle slots of other slabs are given back first when they stand in the way.
        """
        slab = self.slabs.get(capacity)
        old = 0 if slab is None else slab.num_allocated
        for others_trimmed in (False, True):
            if others_trimmed:
                self._trim(except_capacity=capacity)
            beyond_budget = 0 if self.used_bytes else self.limit_bytes - self.budget_bytes
            room = (self.free_bytes + beyond_budget) // self._slot_bytes(capacity)
            extra = min(room, max(1, old), self.max_slots - old)
            if extra >= 1:
                return self._resize(capacity, old + extra)
        return None

    def _trim(self, except_capacity: int) -> None:
        for capacity, slab in list(self.slabs.items()):
            if capacity != except_capacity and slab.num_allocated > len(slab.slots):
                if slab.slots:
                    self._resize(capacity, len(slab.slots))
                else:
                    del self.slabs[capacity]
                    self.storage.remove(capacity)

    def _resize(self, capacity: int, num_slots: int) -> Slab:
        slab = self.slabs.get(capacity)
        self.storage.resize(capacity, num_slots, 0 if slab is None else len(slab.slots))
        if slab is None:
            slab = self.slabs[capacity] = Slab(capacity, self.storage)
        return slab
