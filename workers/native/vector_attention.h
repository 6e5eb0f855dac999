// What attention multiplies, in vectors: see `Attention` in attention.h.

#pragma once

#include <cstdint>

#include "lanes.h"

// Sums over the lanes of 16 vectors, all in the same order: lane j of the result is the sum of v[j].
inline f16 lane_sums(const f16* v) {
    f16 pairs[8], fours[4], halves[2];
    for (int i = 0; i < 8; ++i)
        pairs[i] =
            _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 4; ++i)
        fours[i] = _mm512_add_ps(_mm512_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], 0x44),
                                 _mm512_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], 0xee));
    for (int i = 0; i < 2; ++i)
        halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88),
                                  _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
                         _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
}

template <class E>
class Vectors {
  public:
    using Value = typename E::Value;

    // Queries [parts * height, size], in the order in which they are named below.
    void prepare(const Value* rows, int64_t, int64_t, int head_size) {
        queries = rows;
        size = head_size;
    }
    void finish() {}

    // out[i * out_stride + j] = scale * queries[first + i] . keys[j] for `count` queries and 32 keys
    void scores(int64_t first, int64_t count, const Value* keys, int64_t stride, float scale, float* out,
                int64_t out_stride) const {
        for (int64_t half = 0; half < 2 * LANES; half += LANES)
            for (int64_t i = 0; i < count; ++i) {
                const Value *query = queries + (first + i) * size, *key = keys + half * stride;
                f16 sum[LANES];
                for (int j = 0; j < LANES; ++j) {
                    sum[j] = _mm512_setzero_ps();
                    for (int d = 0; d < size; d += LANES * E::INNER)
                        sum[j] = E::dot_part(sum[j], query + d, key + j * stride + d);
                }
                _mm512_storeu_ps(out + i * out_stride + half,
                                 _mm512_mul_ps(lane_sums(sum), _mm512_set1_ps(scale)));
            }
    }

    // sums[i] += weights[i, j] values[j], rank after rank, for `count` queries; lanes in the order of `side_by_side`
    void add_values(const Value* weights, int64_t weight_stride, int64_t count, const Value* values, int64_t stride,
                    int64_t ranks, float* sums) const {
        for (; count >= 4; count -= 4, weights += 4 * weight_stride, sums += 4 * size)
            add_some<4>(weights, weight_stride, values, stride, ranks, sums);
        if (count == 3) add_some<3>(weights, weight_stride, values, stride, ranks, sums);
        if (count == 2) add_some<2>(weights, weight_stride, values, stride, ranks, sums);
        if (count == 1) add_some<1>(weights, weight_stride, values, stride, ranks, sums);
    }

  private:
    template <int COUNT>
    void add_some(const Value* weights, int64_t weight_stride, const Value* values, int64_t stride, int64_t ranks,
                  float* sums) const {
        for (int d = 0; d < size; d += 2 * LANES) {
            f16 sum[COUNT][2];
            for (int i = 0; i < COUNT; ++i)
                for (int v = 0; v < 2; ++v) sum[i][v] = _mm512_loadu_ps(sums + i * size + d + v * LANES);
            for (int64_t j = 0; j < ranks; j += E::INNER) {
                f16 value[2];
                E::side_by_side(values + j * stride + d, values + (j + E::INNER - 1) * stride + d, value);
                for (int i = 0; i < COUNT; ++i) {
                    const f16 weight = E::everywhere(weights + i * weight_stride + j);
                    for (int v = 0; v < 2; ++v) sum[i][v] = E::multiply_add(sum[i][v], value[v], weight);
                }
            }
            for (int i = 0; i < COUNT; ++i)
                for (int v = 0; v < 2; ++v) _mm512_storeu_ps(sums + i * size + d + v * LANES, sum[i][v]);
        }
    }

    const Value* queries = nullptr;
    int size = 0;
};
