// Linear layers over packed weights: every output is one fixed order of multiply-adds, whatever the number of rows.
//
// Shapes: N outputs and M rows of a layer. Weights are packed in pairs of panels of 16 outputs each (`packed` in
// decoder.py), whose lines take turns, so that a pair is read from its first byte to its last.

#pragma once

#include <omp.h>

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "amx.h"
#include "lanes.h"

constexpr int MOST_ROWS = 14;          // of a tile: its sums, at most 28 vectors, stay in registers
constexpr int LINE = 64;               // bytes of a cache line, which a panel has for every multiply-add of a row
constexpr int MOST_AHEAD = 384 << 10;  // bytes fetched ahead at most: they wait in the second-level cache
constexpr int NEAR = 4096;             // bytes by which larger pairs are fetched ahead of their use

// Memory that is fetched while a tile computes: so many lines, one behind the other, per multiply-add of a row.
struct Fetch {
    const char* from;
    int lines;
};

// y[m, 16 p ..] for ROWS rows and PANELS panels of 16 outputs. A pair of panels is [inner / INNER, 2, 16, INNER]. The
// multiply-adds of each CHAIN values are summed in turn, then these sums.
template <class E, int ROWS, int PANELS>
void tile(const typename E::Value* x, int64_t inner, const typename E::Value* w, const typename E::Value* bias,
          typename E::Value* y, int64_t outputs, Fetch fetch) {
    f16 total[ROWS][PANELS];
    for (int64_t begin = 0; begin < inner; begin += E::CHAIN) {
        f16 sum[ROWS][PANELS];
        for (int m = 0; m < ROWS; ++m)
            for (int p = 0; p < PANELS; ++p) sum[m][p] = _mm512_setzero_ps();
        const int64_t end = std::min(inner, begin + E::CHAIN);
        for (int64_t k = begin; k < end; k += E::INNER) {
            for (int i = 0; i < fetch.lines; ++i) _mm_prefetch(fetch.from + i * LINE, _MM_HINT_T0);
            fetch.from += fetch.lines * LINE;
            f16 weights[PANELS];
            for (int p = 0; p < PANELS; ++p) weights[p] = E::weights(w + (PAIR * k + p * E::INNER) * LANES);
            for (int m = 0; m < ROWS; ++m) {
                const f16 value = E::everywhere(x + m * inner + k);
                for (int p = 0; p < PANELS; ++p) sum[m][p] = E::multiply_add(sum[m][p], value, weights[p]);
            }
        }
        for (int m = 0; m < ROWS; ++m)
            for (int p = 0; p < PANELS; ++p) total[m][p] = begin ? _mm512_add_ps(total[m][p], sum[m][p]) : sum[m][p];
    }
    for (int p = 0; p < PANELS; ++p)
        for (int m = 0; m < ROWS; ++m) {
            f16 value = total[m][p];
            if (bias) value = _mm512_add_ps(E::rounded(value), E::load(bias + p * LANES));
            E::store(y + m * outputs + p * LANES, value);
        }
}

template <class E>
using Tile = void (*)(const typename E::Value*, int64_t, const typename E::Value*, const typename E::Value*,
                      typename E::Value*, int64_t, Fetch);

template <class E, int PANELS, int... M>
constexpr std::array<Tile<E>, sizeof...(M)> tiles_of(std::integer_sequence<int, M...>) {
    return {tile<E, M + 1, PANELS>...};
}

// The tile of `rows` rows and `panels` panels. Not `static`, its table would be one for all libraries of a process.
template <class E>
static Tile<E> tile_of(int64_t rows, int64_t panels) {
    using Rows = std::make_integer_sequence<int, MOST_ROWS>;
    static constexpr std::array<Tile<E>, MOST_ROWS> by_panels[] = {tiles_of<E, 1>(Rows{}), tiles_of<E, PAIR>(Rows{})};
    return by_panels[panels - 1][rows - 1];
}

// The panels [begin, end) of a layer that the calling thread does: whole pairs, but for a last panel without another.
struct Share {
    int64_t begin, end;
    explicit Share(int64_t outputs) {
        const int64_t panels = outputs / LANES, pairs = (panels + PAIR - 1) / PAIR;
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        begin = PAIR * (pairs * thread / threads);
        end = std::min(panels, PAIR * (pairs * (thread + 1) / threads));
    }
    Share(int64_t begin, int64_t end) : begin(begin), end(end) {}
};

// The packed weights of the linear layer that is done next, if it is known.
struct Next {
    const void* weights = nullptr;
    int64_t inner = 0, outputs = 0;
};

// What the `tiles` tiles of a pair of panels fetch together: the pair after it, of this layer or of the next.
template <class E>
class Ahead {
  public:
    Ahead(int64_t inner, int64_t tiles, const Next& next) : lines(inner / E::INNER), tiles(tiles), next(next) {}

    // Of the pair at `w`, which may be the last.
    void start(const typename E::Value* w, bool is_last) {
        pair = reinterpret_cast<const char*>(w);
        bytes = PAIR * lines * LINE;
        from = pair + bytes;
        if (!is_last || !next.weights) return;
        const Share share(next.outputs);
        const int64_t panel = next.inner / E::INNER * LINE;
        from = static_cast<const char*>(next.weights) + share.begin * panel;
        bytes = share.begin < share.end ? PAIR * panel : 0;
    }

    // The part of tile i.
    Fetch part(int64_t i) const {
        if (PAIR * lines * LINE > MOST_AHEAD) return {pair + NEAR, i == 0 ? PAIR : 0};
        const int64_t all = (std::min<int64_t>(bytes, MOST_AHEAD) / LINE + lines - 1) / lines;  // per multiply-add
        const int64_t begin = all * i / tiles, end = all * (i + 1) / tiles;
        return {from + begin * lines * LINE, int(end - begin)};
    }

  private:
    int64_t lines, tiles;  // lines: of a panel
    Next next;
    const char *pair, *from;
    int64_t bytes;
};

// y[M, N] = x[M, inner] w^T (+ bias); N is a multiple of 16. The panels of `share` alone: each thread does its own. All
// rows of a pair of panels are done while its weights are in the cache, in tiles of almost equal height.
template <class E>
void linear_share(const typename E::Value* x, int64_t rows, int64_t inner, const typename E::Value* w,
                  const typename E::Value* bias, typename E::Value* y, int64_t outputs, const Share& share,
                  const Next& next = {}) {
    if (rows == 0 || share.begin >= share.end) return;
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
    if constexpr (std::is_same_v<E, BFloat16>) {
        if (inner % amx::INNER == 0 && amx::granted())
            return amx::linear(x, rows, inner, w, bias, y, outputs, share.begin, share.end);
    }
#endif
    const int64_t tiles = (rows + MOST_ROWS - 1) / MOST_ROWS;
    Ahead<E> ahead(inner, tiles, next);
    for (int64_t first = share.begin, after; first < share.end; first = after) {
        after = after_panels(first, share.end);
        const auto* panels = panel(w, first, inner, E::INNER);
        ahead.start(panels, after == share.end);
        for (int64_t i = 0; i < tiles; ++i) {
            const int64_t m = rows * i / tiles, height = rows * (i + 1) / tiles - m;
            tile_of<E>(height, after - first)(x + m * inner, inner, panels, bias ? bias + first * LANES : nullptr,
                                              y + m * outputs + first * LANES, outputs, ahead.part(i));
        }
    }
}

// All panels, by all threads of a team.
template <class E>
void linear(const typename E::Value* x, int64_t rows, int64_t inner, const typename E::Value* w,
            const typename E::Value* bias, typename E::Value* y, int64_t outputs, const Next& next = {}) {
    linear_share<E>(x, rows, inner, w, bias, y, outputs, Share(outputs), next);
#pragma omp barrier
}
