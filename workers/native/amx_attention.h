// What attention multiplies, in AMX tiles: see `Attention` in attention.h. Keys times queries, so that sixteen keys are
// a tile as they lie in memory; weights times values, whose columns are put side by side in pairs first.

#pragma once

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)

#include <algorithm>
#include <cstdint>
#include <vector>

#include "amx.h"
#include "lanes.h"
#include "lines_ahead.h"

namespace amx {

// Columns at .. at + 3 of a matrix of sixteen rows, as vectors.
inline void four_columns(const float* rows, int64_t stride, int at, f16* columns) {
    f16 part[4];
    for (int i = 0; i < 4; ++i) {  // rows i, 4 + i, 8 + i, 12 + i
        const float* from = rows + i * stride + at;
        part[i] = _mm512_castps128_ps512(_mm_loadu_ps(from));
        part[i] = _mm512_insertf32x4(part[i], _mm_loadu_ps(from + 4 * stride), 1);
        part[i] = _mm512_insertf32x4(part[i], _mm_loadu_ps(from + 8 * stride), 2);
        part[i] = _mm512_insertf32x4(part[i], _mm_loadu_ps(from + 12 * stride), 3);
    }
    auto low = [](f16 a, f16 b) { return _mm512_castps_pd(_mm512_unpacklo_ps(a, b)); };
    auto high = [](f16 a, f16 b) { return _mm512_castps_pd(_mm512_unpackhi_ps(a, b)); };
    const __m512d a = low(part[0], part[1]), b = low(part[2], part[3]);
    const __m512d c = high(part[0], part[1]), d = high(part[2], part[3]);
    columns[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
    columns[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    columns[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d));
    columns[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
}

class Tiles {
  public:
    static constexpr int64_t KEYS_COST = 64;  // a tile takes no longer with all its rows than with one

    // Queries [parts * height, size], in the order in which they are named below, with room for sixteen behind.
    void prepare(const uint16_t* queries, int64_t parts, int64_t part_height, int head_size) {
        height = part_height;
        size = head_size;
        pairs.resize(parts * size / 2 * LANES);
        for (int64_t p = 0; p < parts; ++p)
            for (int d = 0; d < size / 2; d += 4) {
                f16 columns[4];
                four_columns(reinterpret_cast<const float*>(queries + p * height * size), size / 2, d, columns);
                for (int i = 0; i < 4; ++i)
                    _mm512_storeu_ps(pairs.data() + (p * size / 2 + d + i) * LANES, columns[i]);
            }
        configure(ROWS);
    }

    void finish() {
        _tile_release();
        configured = 0;
    }

    // out[i * out_stride + j] = scale * queries[first + i] . keys[j] for `count` queries and 32 keys
    void scores(int64_t first, int64_t count, const uint16_t* keys, int64_t stride, float scale, float* out,
                int64_t out_stride, LinesAhead& ahead) {
        ahead.fetch(32);
        const float* queries = pairs.data() + first / height * size / 2 * LANES;
        const int64_t bytes = stride * sizeof(uint16_t);
        _tile_zero(0);
        _tile_zero(1);
        for (int d = 0; d < size; d += INNER) {
            _tile_loadd(4, queries + d / 2 * LANES, 64);
            _tile_loadd(2, keys + d, bytes);
            _tile_dpbf16ps(0, 2, 4);
            _tile_loadd(3, keys + ROWS * stride + d, bytes);
            _tile_dpbf16ps(1, 3, 4);
        }
        alignas(64) float products[(2 * ROWS + 1) * LANES];
        _tile_stored(0, products, 64);
        _tile_stored(1, products + ROWS * LANES, 64);
        const f16 factor = _mm512_set1_ps(scale);
        for (int64_t i = 0; i < count; i += 4)
            for (int half = 0; half < 2; ++half) {
                f16 columns[4];
                four_columns(products + half * ROWS * LANES, LANES, first % height + i, columns);
                for (int64_t v = 0; v < std::min<int64_t>(4, count - i); ++v)
                    _mm512_storeu_ps(out + (i + v) * out_stride + half * LANES, _mm512_mul_ps(columns[v], factor));
            }
    }

    // sums[i] += weights[i, j] values[j], rank after rank, for `count` queries; lanes in the order of `side_by_side`
    void add_values(const uint16_t* weights, int64_t weight_stride, int64_t count, const uint16_t* values,
                    int64_t stride, int64_t ranks, float* sums, LinesAhead& ahead) {
        if (ranks == 0) return;
        ahead.fetch(32);
        configure(count);
        int d = 0;
        for (; d + 4 * LANES <= size; d += 4 * LANES)
            add_some<true>(weights, weight_stride, values + d, stride, ranks, sums + d);
        if (d < size) add_some<false>(weights, weight_stride, values + d, stride, ranks, sums + d);
    }

  private:
    void configure(int rows) {
        if (rows == configured) return;
        load_shapes(rows, 5);
        configured = rows;
    }

    // 64 values of each column with FOUR tiles, else 32 with two.
    template <bool FOUR>
    void add_some(const uint16_t* weights, int64_t weight_stride, const uint16_t* values, int64_t stride, int64_t ranks,
                  float* sums) const {
        const int64_t bytes = size * sizeof(float);
        _tile_loadd(0, sums, bytes);
        _tile_loadd(1, sums + LANES, bytes);
        if (FOUR) _tile_loadd(2, sums + 2 * LANES, bytes);
        if (FOUR) _tile_loadd(3, sums + 3 * LANES, bytes);
        alignas(64) uint16_t paired[2][4 * TILE];  // by turns: the next block is put together meanwhile
        for (int64_t j = 0; j < ranks; j += INNER) {
            uint16_t* to = paired[j / INNER % 2];
            for (int i = 0; i < ROWS; ++i) {
                const uint16_t* from = values + (j + 2 * i) * stride;
                for (int d = 0; d < (FOUR ? 4 : 2); d += 2) {
                    f16 pair[2];
                    BFloat16::side_by_side(from + d * LANES, from + stride + d * LANES, pair);
                    _mm512_store_ps(reinterpret_cast<float*>(to + d * TILE + i * 2 * LANES), pair[0]);
                    _mm512_store_ps(reinterpret_cast<float*>(to + (d + 1) * TILE + i * 2 * LANES), pair[1]);
                }
            }
            _tile_loadd(4, weights + j, weight_stride * sizeof(uint16_t));
            _tile_loadd(6, to, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, to + TILE, 64);
            _tile_dpbf16ps(1, 4, 7);
            if (!FOUR) continue;
            _tile_loadd(6, to + 2 * TILE, 64);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, to + 3 * TILE, 64);
            _tile_dpbf16ps(3, 4, 7);
        }
        _tile_stored(0, sums, bytes);
        _tile_stored(1, sums + LANES, bytes);
        if (FOUR) _tile_stored(2, sums + 2 * LANES, bytes);
        if (FOUR) _tile_stored(3, sums + 3 * LANES, bytes);
    }

    int64_t height = 0;
    int size = 0, configured = 0;
    std::vector<float> pairs;
};

}  // namespace amx

#endif
