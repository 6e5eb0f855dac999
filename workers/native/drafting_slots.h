// Numbers of entries by hash: what a hash table is beside its entries, which stay where they are.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

// The upper half of a product depends on all bits of its factors.
inline uint32_t mixed(uint64_t value) { return static_cast<uint32_t>(value * 0x9E3779B97F4A7C15u >> 32); }

// Linear probing. A slot holds the whole hash, so that entries, which are far away in memory, are seldom looked at in
// vain.
class Slots {
  public:
    static constexpr uint32_t NONE = UINT32_MAX;

    // The entry of this hash that `is_it`, or NONE.
    template <class IsIt>
    uint32_t find(uint32_t hash, IsIt is_it) const {
        for (size_t slot = hash & mask(); slots_[slot].entry != NONE; slot = (slot + 1) & mask()) {
            if (slots_[slot].hash == hash && is_it(slots_[slot].entry)) return slots_[slot].entry;
        }
        return NONE;
    }

    void put(uint32_t hash, uint32_t entry) {
        if (2 * ++count_ > slots_.size()) grow();
        slots_[free_slot(hash)] = {hash, entry};
    }

    // An entry that is there has another number from now on, or, with NONE, is gone.
    void renumber(uint32_t hash, uint32_t entry, uint32_t number) {
        size_t slot = hash & mask();
        while (slots_[slot].entry != entry) slot = (slot + 1) & mask();
        slots_[slot].entry = number;
        if (number == NONE) --count_, close(slot);
    }

  private:
    struct Slot {
        uint32_t hash, entry;
    };

    size_t mask() const { return slots_.size() - 1; }

    size_t free_slot(uint32_t hash) const {
        size_t slot = hash & mask();
        while (slots_[slot].entry != NONE) slot = (slot + 1) & mask();
        return slot;
    }

    void grow() {
        std::vector<Slot> old(2 * slots_.size(), Slot{0, NONE});
        old.swap(slots_);
        for (const Slot& slot : old) {
            if (slot.entry != NONE) slots_[free_slot(slot.hash)] = slot;
        }
    }

    // Entries behind a free slot that were pushed on by it move up, so that a search never ends too early.
    void close(size_t slot) {
        for (size_t next = (slot + 1) & mask(); slots_[next].entry != NONE; next = (next + 1) & mask()) {
            if (((next - slots_[next].hash) & mask()) < ((next - slot) & mask())) continue;
            slots_[slot] = slots_[next];
            slots_[next].entry = NONE;
            slot = next;
        }
    }

    std::vector<Slot> slots_ = std::vector<Slot>(16, Slot{0, NONE});  // a power of two, at most half of it taken
    size_t count_ = 0;
};
