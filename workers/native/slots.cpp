// Inputs of the auxiliary slots of parallel token prediction: what adapter.py's `slot_inputs` makes, in one call.
//
// Each of the small tensor operations there is cheap, but between two forwards nothing is in the caches, not even code,
// and thirty of them took as long as the rows themselves.
//
// Shapes: R rows (slots of all windows, one after the other), F features of u, E hidden, a multiple of 16.

#include <cstdint>
#include <cstring>

#include "lanes.h"
#include "noise.h"

extern "C" {

// Mirrored by ctypes in slots.py. A row's noise is that of token index[r] of the sample with key[2 r], key[2 r + 1]; a
// row with index -1 is shown `start` [E] instead. token[r] is the token whose embedding is added, -1: none.
struct Slots {
    int64_t rows, hidden, kind, features;
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

enum Kind { ARITHMETIC, BITS32, THRESHOLD, LINEAR, CONSTANT };  // in the order of FEATURES (auxiliary_embedding.py)

// The features of u = number / 2^24, as there.
void features_of(uint32_t number, int64_t kind, float* f) {
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
}

template <class E>
void slot_inputs(const Slots& slots, typename E::Value* out) {
    const auto* embedding = static_cast<const typename E::Value*>(slots.embedding);
    const int64_t hidden = slots.hidden;
    for (int64_t r = 0; r < slots.rows; ++r) {
        const bool is_shown_noise = slots.index[r] >= 0;
        float f[MOST_FEATURES];
        if (is_shown_noise) features_of(grid_uniform(stream_of(slots.key + 2 * r, slots.index[r])), slots.kind, f);
        for (int64_t e = 0; e < hidden; e += LANES) {
            f16 sum = is_shown_noise ? _mm512_setzero_ps() : _mm512_loadu_ps(slots.start + e);
            for (int64_t i = 0; is_shown_noise && i < slots.features; ++i)
                sum = _mm512_fmadd_ps(_mm512_set1_ps(f[i]), _mm512_loadu_ps(slots.weight + i * hidden + e), sum);
            if (slots.token[r] >= 0) sum = _mm512_add_ps(sum, E::load(embedding + slots.token[r] * hidden + e));
            E::store(out + r * hidden + e, sum);
        }
    }
}

}  // namespace

extern "C" {

void slots_float32(const Slots& slots, float* out) { slot_inputs<Float32>(slots, out); }

#ifdef __AVX512BF16__
void slots_bfloat16(const Slots& slots, uint16_t* out) { slot_inputs<BFloat16>(slots, out); }
#endif
}
