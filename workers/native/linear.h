// Linear layers over packed weights: every output is one chain of multiply-adds, whatever the number of rows.
//
// Shapes: N outputs and M rows of a layer. Weights are packed in panels of 16 outputs (`packed` in decoder.py).

#pragma once

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "amx.h"
#include "lanes.h"

constexpr int MOST_ROWS = 12;     // of a tile: its sums, at most 24 vectors, stay in registers
constexpr int MOST_PANELS = 3;
constexpr int AHEAD = 2048;       // bytes by which the weights are fetched ahead: they come from memory, once per step

// y[m, 16 p ..] for ROWS rows and PANELS panels of 16 outputs. A panel is [inner / INNER, 16, INNER].
template <class E, int ROWS, int PANELS>
void tile(const typename E::Value* x, int64_t inner, const typename E::Value* w, const typename E::Value* bias,
          typename E::Value* y, int64_t outputs) {
    f16 sum[ROWS][PANELS];
    for (int m = 0; m < ROWS; ++m)
        for (int p = 0; p < PANELS; ++p) sum[m][p] = _mm512_setzero_ps();
    for (int64_t k = 0; k < inner; k += E::INNER) {
        f16 weights[PANELS];
        for (int p = 0; p < PANELS; ++p) {
            const auto* from = w + (p * inner + k) * LANES;
            _mm_prefetch(reinterpret_cast<const char*>(from) + AHEAD, _MM_HINT_T0);
            weights[p] = E::weights(from);
        }
        for (int m = 0; m < ROWS; ++m) {
            const f16 value = E::everywhere(x + m * inner + k);
            for (int p = 0; p < PANELS; ++p) sum[m][p] = E::multiply_add(sum[m][p], value, weights[p]);
        }
    }
    for (int p = 0; p < PANELS; ++p)
        for (int m = 0; m < ROWS; ++m) {
            f16 value = sum[m][p];
            if (bias) value = _mm512_add_ps(E::rounded(value), E::load(bias + p * LANES));
            E::store(y + m * outputs + p * LANES, value);
        }
}

template <class E>
using Tile = void (*)(const typename E::Value*, int64_t, const typename E::Value*, const typename E::Value*,
                      typename E::Value*, int64_t);

template <class E, int PANELS, int... M>
constexpr std::array<Tile<E>, sizeof...(M)> tiles_of(std::integer_sequence<int, M...>) {
    return {tile<E, M + 1, PANELS>...};
}

// The tile of `rows` rows and `panels` panels.
template <class E>
Tile<E> tile_of(int64_t rows, int64_t panels) {
    using Rows = std::make_integer_sequence<int, MOST_ROWS>;
    static constexpr std::array<Tile<E>, MOST_ROWS> by_panels[] = {tiles_of<E, 1>(Rows{}), tiles_of<E, 2>(Rows{}),
                                                                   tiles_of<E, MOST_PANELS>(Rows{})};
    return by_panels[panels - 1][rows - 1];
}

// y[M, N] = x[M, inner] w^T (+ bias); N is a multiple of 16. All rows of a panel group are done while its weights are
// in the cache, in tiles of almost equal height. Called by all threads of a team.
template <class E>
void linear(const typename E::Value* x, int64_t rows, int64_t inner, const typename E::Value* w,
            const typename E::Value* bias, typename E::Value* y, int64_t outputs) {
    if (rows == 0) return;
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
    if constexpr (std::is_same_v<E, BFloat16>) {
        if (inner % amx::INNER == 0 && amx::granted()) return amx::linear(x, rows, inner, w, bias, y, outputs);
    }
#endif
    const int64_t tiles = (rows + MOST_ROWS - 1) / MOST_ROWS, highest = (rows + tiles - 1) / tiles;
    const int64_t width = highest <= 8 ? MOST_PANELS : 2, panels = outputs / LANES;
#pragma omp for schedule(static)
    for (int64_t first = 0; first < panels; first += width) {
        const int64_t count = std::min(width, panels - first);
        for (int64_t i = 0; i < tiles; ++i) {
            const int64_t m = rows * i / tiles, height = rows * (i + 1) / tiles - m;
            tile_of<E>(height, count)(x + m * inner, inner, w + first * inner * LANES,
                                      bias ? bias + first * LANES : nullptr, y + m * outputs + first * LANES, outputs);
        }
    }
}
