"""Slots, slabs and commits, against a dictionary that remembers what each sequence wrote."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline.config import EngineConfig
from workers.kv_cache import KVCache, Move, Slot, budget_bytes, commit_move
from workers.kv_storage import KVShape

SHAPE = KVShape(layers=2, heads=1, head_size=2, dtype=torch.float32, device=torch.device("cpu"))
SLOT_BYTES = 128 * SHAPE.bytes_per_token


def test_commit_move_examples() -> None:
    slot = Slot(None, 0)  # type: ignore[arg-type]
    assert commit_move(slot, 10, (0, 1, 2)) is None
    assert commit_move(slot, 10, (0, 1, 3)) == Move(slot, (13,), (12,))
    assert commit_move(slot, 5, (0, 2, 4)) == Move(slot, (7, 9), (6, 7))


def test_overlapping_moves_read_before_they_write() -> None:
    cache = KVCache(SHAPE, 10 * SLOT_BYTES, max_slots=4)
    slot = cache.allocate(20)
    assert slot is not None
    slot.slab.kv_L2SCKD[:, :, slot.index, :10] = torch.arange(10.0)[:, None, None]
    cache.commit([Move(slot, (2, 3, 4), (1, 2, 3))])
    assert slot.slab.kv_L2SCKD[1, 0, slot.index, :5, 0, 0].tolist() == [0, 2, 3, 4, 4]


def test_capacity_is_a_power_of_two_of_at_least_128() -> None:
    cache = KVCache(SHAPE, 100 * SLOT_BYTES, max_slots=4)
    capacities = [slot.capacity for columns in (1, 128, 129, 256, 257) if (slot := cache.allocate(columns))]
    assert capacities == [128, 128, 256, 256, 512]


def test_idle_slots_of_other_slabs_make_room() -> None:
    cache = KVCache(SHAPE, 4 * SLOT_BYTES, max_slots=8)
    small = [cache.allocate(100) for _ in range(4)]
    assert cache.allocate(100) is None
    for slot in small[:3]:
        assert slot is not None
        cache.free(slot)
    assert cache.allocate(200) is not None
    assert cache.allocated_bytes <= cache.budget_bytes


def test_fits_alone() -> None:
    cache = KVCache(SHAPE, 4 * SLOT_BYTES, max_slots=8)
    assert cache.fits_alone(512)
    assert not cache.fits_alone(513)


def test_budget_from_the_job() -> None:
    assert budget_bytes(EngineConfig(kv_memory_gb=0.5), torch.device("cpu")) == 2**29


class CacheMachine(RuleBasedStateMachine):
    """Sequences come, grow, share prompts and go; each must find its own columns again, within the budget."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(SHAPE, 12 * SLOT_BYTES, max_slots=6)
        self.written: dict[Slot, list[float]] = {}
        self.clock = 0.0

    def write(self, slot: Slot, columns: int) -> None:
        for _ in range(min(columns, slot.capacity - slot.used)):
            self.clock += 1
            slot.slab.kv_L2SCKD[:, :, slot.index, slot.used] = self.clock
            slot.used += 1
            self.written[slot].append(self.clock)

    @rule(columns=st.integers(1, 300))
    def come(self, columns: int) -> None:
        slot = self.cache.allocate(columns)
        if slot is not None:
            self.written[slot] = []
            self.write(slot, columns)

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(list(self.written)))
        del self.written[slot]
        self.cache.free(slot)

    @precondition(lambda self: self.written)
    @rule(data=st.data(), more=st.integers(1, 50))
    def grow(self, data: st.DataObject, more: int) -> None:
        slot = data.draw(st.sampled_from(list(self.written)))
        if slot.used + more <= slot.capacity:
            self.write(slot, more)
            return
        larger = self.cache.allocate(slot.used + more)
        if larger is not None:
            self.cache.copy(slot, larger, slot.used)
            self.written[larger] = self.written.pop(slot)
            self.cache.free(slot)
            self.write(larger, more)

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(list(self.written)))
        columns = data.draw(st.integers(0, source.used))
        slot = self.cache.allocate(max(1, columns))
        if slot is not None:
            self.cache.copy(source, slot, columns)
            self.written[slot] = self.written[source][:columns]

    @invariant()
    def everybody_finds_its_own(self) -> None:
        for slot, values in self.written.items():
            found = slot.slab.kv_L2SCKD[1, 1, slot.index, : slot.used, 0, 0].tolist()
            assert found == values

    @invariant()
    def within_budget(self) -> None:
        assert self.cache.used_bytes <= self.cache.allocated_bytes <= self.cache.budget_bytes


CacheMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestCache = CacheMachine.TestCase
