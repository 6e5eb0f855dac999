// What attention multiplies, in vectors: see `Attention` in attention.h.

#pragma once

#include <cstdint>
#include <type_traits>

#include "lanes.h"
#include "lines_ahead.h"

// Lane j of v[i] <-> lane i of v[j].
inline void transpose(f16* v) {
    auto low = [](f16 a, f16 b) {
        return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
    };
    auto high = [](f16 a, f16 b) {
        return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
    };
    f16 pairs[LANES], fours[LANES], eights[LANES];
    for (int i = 0; i < LANES; i += 2) {
        pairs[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4)  // quarter q of fours[i + c]: lane 4 q + c of v[i .. i + 3]
        for (int c = 0; c < 2; ++c) {
            fours[i + 2 * c] = low(pairs[i + c], pairs[i + 2 + c]);
            fours[i + 2 * c + 1] = high(pairs[i + c], pairs[i + 2 + c]);
        }
    for (int c = 0; c < 4; ++c)
        for (int half = 0; half < 2; ++half) {
            const f16 a = fours[8 * half + c], b = fours[8 * half + 4 + c];
            eights[4 * half + c] = _mm512_shuffle_f32x4(a, b, 0x88);      // quarters 0 and 2 of both
            eights[8 + 4 * half + c] = _mm512_shuffle_f32x4(a, b, 0xdd);  // quarters 1 and 3
        }
    for (int c = 0; c < 4; ++c)
        for (int odd = 0; odd < 2; ++odd) {
            const f16 a = eights[8 * odd + c], b = eights[8 * odd + 4 + c];
            v[4 * odd + c] = _mm512_shuffle_f32x4(a, b, 0x88);
            v[8 + 4 * odd + c] = _mm512_shuffle_f32x4(a, b, 0xdd);
        }
}

template <class E>
class Vectors {
  public:
    using Value = typename E::Value;
    static constexpr int64_t KEYS_COST = 2;

    // Queries [parts * height, size], in the order in which they are named below.
    void prepare(const Value* rows, int64_t, int64_t, int head_size) {
        queries = rows;
        size = head_size;
    }
    void finish() {}

    // out[i * out_stride + j] = scale * queries[first + i] . keys[j] for `count` queries and 32 keys
    void scores(int64_t first, int64_t count, const Value* keys, int64_t stride, float scale, float* out,
                int64_t out_stride, LinesAhead& ahead) const {
        for (int64_t half = 0; half < 2 * LANES; half += LANES, keys += LANES * stride, out += LANES)
            for (int d = 0; d < size; d += LANES * E::INNER) {
                f16 inner[LANES];  // lane j: what key j holds there
                for (int j = 0; j < LANES; ++j) {
                    inner[j] = E::weights(keys + j * stride + d);
                    ahead.fetch(1);
                }
                transpose(inner);
                in_parts(count, [&](auto some, int64_t i) {
                    score_some<some>(queries + (first + i) * size + d, inner, d > 0,
                                     d + LANES * E::INNER < size ? 1.0f : scale, out + i * out_stride, out_stride);
                });
            }
    }

    // sums[i] += weights[i, j] values[j], rank after rank, for `count` queries; lanes in the order of `side_by_side`
    void add_values(const Value* weights, int64_t weight_stride, int64_t count, const Value* values, int64_t stride,
                    int64_t ranks, float* sums, LinesAhead& ahead) const {
        int d = 0;
        auto add_slice = [&](auto vectors) {
            in_parts(count, [&](auto some, int64_t i) {
                add_some<some, vectors>(weights + i * weight_stride, weight_stride, values + d, stride, ranks,
                                        sums + i * size + d, ahead);
            });
            d += vectors * LANES;
        };
        while (d + 4 * LANES <= size) add_slice(std::integral_constant<int, 4>());
        while (d < size) add_slice(std::integral_constant<int, 2>());
    }

  private:
    static constexpr int AT_ONCE = 5;  // queries whose sums stay in registers

    // f(queries, the first) of at most AT_ONCE queries each, their number as a constant
    template <class F>
    static void in_parts(int64_t count, F f) {
        const int64_t parts = (count + AT_ONCE - 1) / AT_ONCE;
        for (int64_t p = 0; p < parts; ++p) {
            const int64_t begin = count * p / parts;
            switch (count * (p + 1) / parts - begin) {
                case 1: f(std::integral_constant<int, 1>(), begin); break;
                case 2: f(std::integral_constant<int, 2>(), begin); break;
                case 3: f(std::integral_constant<int, 3>(), begin); break;
                case 4: f(std::integral_constant<int, 4>(), begin); break;
                default: f(std::integral_constant<int, AT_ONCE>(), begin);
            }
        }
    }

    // The part of scores that `inner` makes: two chains, since one would wait for itself.
    template <int COUNT>
    void score_some(const Value* query, const f16* inner, bool adds, float scale, float* out,
                    int64_t out_stride) const {
        f16 sum[COUNT][2];
        for (int i = 0; i < COUNT; ++i)
            for (int odd = 0; odd < 2; ++odd) sum[i][odd] = _mm512_setzero_ps();
        for (int p = 0; p < LANES; p += 2)
            for (int odd = 0; odd < 2; ++odd)
                for (int i = 0; i < COUNT; ++i)
                    sum[i][odd] = E::multiply_add(sum[i][odd], inner[p + odd],
                                                  E::everywhere(query + i * size + (p + odd) * E::INNER));
        for (int i = 0; i < COUNT; ++i) {
            f16 total = _mm512_add_ps(sum[i][0], sum[i][1]);
            if (adds) total = _mm512_add_ps(_mm512_loadu_ps(out + i * out_stride), total);
            _mm512_storeu_ps(out + i * out_stride, _mm512_mul_ps(total, _mm512_set1_ps(scale)));
        }
    }

    template <int COUNT, int VECTORS>
    void add_some(const Value* weights, int64_t weight_stride, const Value* values, int64_t stride, int64_t ranks,
                  float* sums, LinesAhead& ahead) const {
        f16 sum[COUNT][VECTORS];
        for (int i = 0; i < COUNT; ++i)
            for (int v = 0; v < VECTORS; ++v) sum[i][v] = _mm512_loadu_ps(sums + i * size + v * LANES);
        for (int64_t j = 0; j < ranks; j += E::INNER) {
            ahead.fetch(VECTORS);
            f16 value[VECTORS];
            for (int v = 0; v < VECTORS; v += 2)
                E::side_by_side(values + j * stride + v * LANES, values + (j + E::INNER - 1) * stride + v * LANES,
                                value + v);
            for (int i = 0; i < COUNT; ++i) {
                const f16 weight = E::everywhere(weights + i * weight_stride + j);
                for (int v = 0; v < VECTORS; ++v) sum[i][v] = E::multiply_add(sum[i][v], value[v], weight);
            }
        }
        for (int i = 0; i < COUNT; ++i)
            for (int v = 0; v < VECTORS; ++v) _mm512_storeu_ps(sums + i * size + v * LANES, sum[i][v]);
    }

    const Value* queries = nullptr;
    int size = 0;
};
