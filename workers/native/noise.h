// The noise of randomness.py in vectors.

#pragma once

#include <cmath>
#include <cstdint>

#include "lanes.h"

constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15;

inline __m512i mix64(__m512i x) {
    x = _mm512_xor_si512(x, _mm512_srli_epi64(x, 30));
    x = _mm512_mullo_epi64(x, _mm512_set1_epi64(0xBF58476D1CE4E5B9));
    x = _mm512_xor_si512(x, _mm512_srli_epi64(x, 27));
    x = _mm512_mullo_epi64(x, _mm512_set1_epi64(0x94D049BB133111EB));
    return _mm512_xor_si512(x, _mm512_srli_epi64(x, 31));
}

// The uniform numbers behind the Gumbel noise of tokens v .. v + 15.
inline f16 uniforms(uint64_t stream, int64_t v) {
    const __m512i steps = _mm512_mullo_epi64(_mm512_setr_epi64(1, 2, 3, 4, 5, 6, 7, 8), _mm512_set1_epi64(GAMMA));
    const __m512i low = mix64(_mm512_add_epi64(steps, _mm512_set1_epi64(stream + v * GAMMA)));
    const __m512i high = mix64(_mm512_add_epi64(steps, _mm512_set1_epi64(stream + (v + 8) * GAMMA)));
    const __m512i bits = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi64_epi32(_mm512_srli_epi64(low, 32))),
                                            _mm512_cvtepi64_epi32(_mm512_srli_epi64(high, 32)), 1);
    const f16 middle = _mm512_add_ps(_mm512_cvtepu32_ps(bits), _mm512_set1_ps(0.5f));
    return _mm512_min_ps(_mm512_mul_ps(middle, _mm512_set1_ps(0x1p-32f)), _mm512_set1_ps(1.0f - 0x1p-24f));
}

inline uint64_t mix64(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB;
    return x ^ x >> 31;
}

// The noise stream of token `index` of the sample with this key.
inline uint64_t stream_of(const uint64_t key[2], uint64_t index) {
    return mix64(mix64(key[0] + index * GAMMA) ^ key[1]);
}

// The uniform number of a stream, in units of 2^-24.
inline uint32_t grid_uniform(uint64_t stream) { return mix64(stream) >> 40; }

inline double uniform(uint64_t stream) { return grid_uniform(stream) * 0x1p-24; }

inline double gumbel(float u) { return -std::log(-std::log1p(-static_cast<double>(u))); }
