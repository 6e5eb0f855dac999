// Linear layers in bfloat16 through AMX tiles: sixteen rows cost hardly more than one. A weight panel as `packed` lays
// it out is a row of tiles, of 32 inner values by 16 outputs each; the lines of two panels take turns. The order of sums
// of an output depends on nothing but the inner dimension, as elsewhere: all row counts run through here, or none.

#pragma once

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "lanes.h"

namespace amx {

constexpr int ROWS = 16, INNER = 32;  // of a tile
constexpr int TILE = INNER * LANES;   // values of a weight tile
constexpr int PER_LINE = BFloat16::INNER * LANES;  // values of a weight tile in a cache line
constexpr int WEIGHTS_AHEAD = 4 * PAIR * TILE;

// Whether the kernel lets this process use tiles; asked once.
inline bool granted() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool yes = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return yes;
}

// Tile registers below `inputs` hold `rows` rows, those from there on sixteen.
inline void load_shapes(int rows, int inputs) {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes_per_row[16] = {};
        uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) {
        config.bytes_per_row[i] = 64;
        config.rows[i] = i < inputs ? rows : ROWS;
    }
    _tile_loadconfig(&config);
}

// The tile registers of this thread while it lives: 0-3 sums, 4-5 inputs, 6-7 weights.
class Shapes {
  public:
    explicit Shapes(int rows) { load_shapes(rows, 6); }
    ~Shapes() { _tile_release(); }
};

inline void fetch_ahead(const uint16_t* weights) {
    for (int i = 0; i < TILE / PER_LINE; ++i)
        _mm_prefetch(reinterpret_cast<const char*>(weights + WEIGHTS_AHEAD + i * PAIR * PER_LINE), _MM_HINT_T0);
}

// y[m, 16 p ..] of one tile of sums.
inline void put(const float* sums, int rows, const uint16_t* bias, uint16_t* y, int64_t outputs) {
    for (int m = 0; m < rows; ++m) {
        f16 value = _mm512_load_ps(sums + m * LANES);
        if (bias) value = _mm512_add_ps(BFloat16::rounded(value), BFloat16::load(bias));
        BFloat16::store(y + m * outputs, value);
    }
}

// `rows` rows from each of `first` and `second`, PANELS (1 or 2) panels of outputs; with FETCH the weights come from
// memory. BOTH = false leaves out the second.
template <int PANELS, bool BOTH, bool FETCH>
void block(const uint16_t* x, int64_t first, int64_t second, int rows, int64_t inner, const uint16_t* w,
           const uint16_t* bias, uint16_t* y, int64_t outputs) {
    const uint16_t *a = x + first * inner, *b = x + second * inner;
    const int64_t stride = inner * sizeof(uint16_t);
    _tile_zero(0);
    if (PANELS > 1) _tile_zero(1);
    if (BOTH) _tile_zero(2);
    if (BOTH && PANELS > 1) _tile_zero(3);
    for (int64_t k = 0; k < inner; k += INNER) {
        const uint16_t *w0 = w + PAIR * k * LANES, *w1 = w0 + PER_LINE;
        if (FETCH) fetch_ahead(w0);
        _tile_loadd(6, w0, PAIR * 64);
        _tile_loadd(4, a + k, stride);
        _tile_dpbf16ps(0, 4, 6);
        if (PANELS > 1) {
            if (FETCH) fetch_ahead(w1);
            _tile_loadd(7, w1, PAIR * 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (BOTH) {
            _tile_loadd(5, b + k, stride);
            _tile_dpbf16ps(2, 5, 6);
            if (PANELS > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    alignas(64) float sums[4][ROWS * LANES];
    _tile_stored(0, sums[0], 64);
    if (PANELS > 1) _tile_stored(1, sums[1], 64);
    if (BOTH) _tile_stored(2, sums[2], 64);
    if (BOTH && PANELS > 1) _tile_stored(3, sums[3], 64);
    for (int p = 0; p < PANELS; ++p) {
        const uint16_t* own = bias ? bias + p * LANES : nullptr;
        put(sums[p], rows, own, y + first * outputs + p * LANES, outputs);
        if (BOTH) put(sums[2 + p], rows, own, y + second * outputs + p * LANES, outputs);
    }
}

template <int PANELS>
void panels(const uint16_t* x, int64_t rows, int64_t inner, const uint16_t* w, const uint16_t* bias, uint16_t* y,
            int64_t outputs) {
    const int height = std::min<int64_t>(rows, ROWS);
    if (rows <= ROWS) return block<PANELS, false, true>(x, 0, 0, height, inner, w, bias, y, outputs);
    // The last tile may do some rows of the one before it again: they come out the same.
    auto start = [&](int64_t m) { return std::min(m, rows - ROWS); };
    block<PANELS, true, true>(x, 0, start(ROWS), height, inner, w, bias, y, outputs);
    for (int64_t m = 2 * ROWS; m < rows; m += 2 * ROWS) {
        if (m + ROWS < rows)
            block<PANELS, true, false>(x, m, start(m + ROWS), height, inner, w, bias, y, outputs);
        else
            block<PANELS, false, false>(x, start(m), 0, height, inner, w, bias, y, outputs);
    }
}

// The panels [begin, end).
inline void linear(const uint16_t* x, int64_t rows, int64_t inner, const uint16_t* w, const uint16_t* bias,
                   uint16_t* y, int64_t outputs, int64_t begin, int64_t end) {
    const Shapes shapes(std::min<int64_t>(rows, ROWS));
    for (int64_t first = begin, after; first < end; first = after) {
        after = after_panels(first, end);
        const auto* own = bias ? bias + first * LANES : nullptr;
        const auto* from = panel(w, first, inner, BFloat16::INNER);
        auto* to = y + first * LANES;
        if (after - first > 1)
            panels<2>(x, rows, inner, from, own, to, outputs);
        else
            panels<1>(x, rows, inner, from, own, to, outputs);
    }
}

}  // namespace amx

#endif
