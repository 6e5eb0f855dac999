// Inputs of the auxiliary slots of parallel token prediction: what adapter.py's `slot_inputs` makes, in one call.
//
// Each of the small tensor operations there is cheap, but between two forwards nothing is in the caches, not even code,
// and thirty of them took as long as the rows themselves.
//
// Shapes: R rows (slots of all windows, one after the other), F features of u, E hidden.

#include <cstdint>
#include <cstring>
#include <vector>

#include "lanes.h"
#include "noise.h"

extern "C" {

// Mirrored by ctypes in slots.py. A row's noise is that of token index[r] of the sample with key[2 r], key[2 r + 1]; a
// row with index -1 is shown `start` [E] instead. token[r] is the token whose embedding is added, -1: none.
struct Slots {
    int64_t rows, hidden, kind;
    const uint64_t* key;
    const int64_t *index, *token;
    const float *weight, *start;  // [F, E]
    const void* embedding;        // [V, E]
};
}

namespace {

constexpr int BITS = 24;
constexpr uint32_t GRID = 1u << BITS;
constexpr int MOST_FEATURES = 32;

enum Kind { ARITHMETIC, BITS32, THRESHOLD, LINEAR, CONSTANT };  // in the order of slots.py

// The features of u = number / 2^24 (auxiliary_embedding.py) and how many they are.
int features_of(uint32_t number, int64_t kind, float* f) {
    const float u = number * 0x1p-24f;
    uint32_t word;
    std::memcpy(&word, &u, sizeof word);
    for (int i = 0; i < MOST_FEATURES; ++i) {
        if (kind == ARITHMETIC) f[i] = (i < BITS ? (number << i) & (GRID - 1) : 0) <= GRID / 2;
        if (kind == BITS32) f[i] = word >> (31 - i) & 1;
        if (kind == THRESHOLD) f[i] = static_cast<uint64_t>(number) * 64 >= static_cast<uint64_t>(2 * i + 1) * GRID;
    }
    if (kind == LINEAR) f[0] = u, f[1] = 1.0f;
    if (kind == CONSTANT) f[0] = 1.0f;
    return kind == LINEAR ? 2 : kind == CONSTANT ? 1 : MOST_FEATURES;
}

void narrowed(const float* from, float* to, int64_t size) { std::memcpy(to, from, size * sizeof *to); }

void narrowed(const float* from, uint16_t* to, int64_t size) {  // to the nearest bfloat16, ties to even
    for (int64_t e = 0; e < size; ++e) {
        uint32_t word;
        std::memcpy(&word, from + e, sizeof word);
        to[e] = (word + 0x7fff + (word >> 16 & 1)) >> 16;
    }
}

template <class Value>
void slot_inputs(const Slots& slots, Value* out) {
    const int64_t hidden = slots.hidden;
    const auto* embedding = static_cast<const Value*>(slots.embedding);
    static thread_local std::vector<float> sum;
    for (int64_t r = 0; r < slots.rows; ++r) {
        sum.assign(hidden, 0.0f);
        if (slots.index[r] < 0) {
            std::memcpy(sum.data(), slots.start, hidden * sizeof(float));
        } else {
            float f[MOST_FEATURES];
            const uint32_t number = grid_uniform(stream_of(slots.key + 2 * r, slots.index[r]));
            const int features = features_of(number, slots.kind, f);
            for (int i = 0; i < features; ++i)
                if (f[i] != 0.0f)
                    for (int64_t e = 0; e < hidden; ++e) sum[e] += f[i] * slots.weight[i * hidden + e];
        }
        if (slots.token[r] >= 0) {
            const Value* row = embedding + slots.token[r] * hidden;
            for (int64_t e = 0; e < hidden; e += LANES) {
                const __mmask16 real = hidden - e >= LANES ? 0xffff : (1u << (hidden - e)) - 1;
                const f16 values = _mm512_add_ps(load_some(sum.data() + e, real), load_some(row + e, real));
                _mm512_mask_storeu_ps(sum.data() + e, real, values);
            }
        }
        narrowed(sum.data(), out + r * hidden, hidden);
    }
}

}  // namespace

extern "C" {

void slots_float32(const Slots& slots, float* out) { slot_inputs(slots, out); }

void slots_bfloat16(const Slots& slots, uint16_t* out) { slot_inputs(slots, out); }
}
