// Vectors of sixteen floats, and how values of the two served data types come into them.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

constexpr int LANES = 16;  // floats of a vector, and outputs of a weight panel
constexpr int PAIR = 2;    // panels whose lines take turns

using f16 = __m512;

// Up to sixteen values as floats: zeros where `real` has no bit.
inline f16 load_some(const float* p, __mmask16 real) { return _mm512_maskz_loadu_ps(real, p); }
inline f16 load_some(const uint16_t* p, __mmask16 real) {  // bfloat16
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(real, p)), 16));
}

struct Float32 {
    using Value = float;
    static constexpr int INNER = 1;    // inner-dimension values of one multiply-add
    static constexpr int CHAIN = 64;   // and of one sum: shorter chains of additions round less
    static f16 load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, f16 v) { _mm512_storeu_ps(p, v); }
    static f16 rounded(f16 v) { return v; }
    static f16 weights(const float* p) { return load(p); }
    static f16 everywhere(const float* p) { return _mm512_set1_ps(*p); }
    static f16 multiply_add(f16 sum, f16 x, f16 w) { return _mm512_fmadd_ps(x, w, sum); }
    static void side_by_side(const float* a, const float*, f16* values) {
        values[0] = load(a);
        values[1] = load(a + LANES);
    }
    static void in_order(f16*) {}
};

#ifdef __AVX512BF16__
struct BFloat16 {
    using Value = uint16_t;
    static constexpr int INNER = 2;
    static constexpr int64_t CHAIN = INT64_MAX / 2;  // weights are rounded far more than sums
    static f16 load(const uint16_t* p) {
        return load_some(p, 0xffff);
    }
    static void store(uint16_t* p, f16 v) {
        __m256bh half = _mm512_cvtneps_pbh(v);
        std::memcpy(p, &half, sizeof half);
    }
    static f16 rounded(f16 v) {
        uint16_t half[LANES];
        store(half, v);
        return load(half);
    }
    // Sixteen pairs each, as bits: one pair of the inner dimension per output, or the same pair for all.
    static f16 weights(const uint16_t* p) { return _mm512_castsi512_ps(_mm512_loadu_si512(p)); }
    static f16 everywhere(const uint16_t* p) {
        int32_t pair;
        std::memcpy(&pair, p, sizeof pair);
        return _mm512_castsi512_ps(_mm512_set1_epi32(pair));
    }
    static f16 multiply_add(f16 sum, f16 x, f16 w) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w); }
    // Pairs (a[i], b[i]) of 32 values each, in the order that `in_order` undoes.
    static void side_by_side(const uint16_t* a, const uint16_t* b, f16* pairs) {
        const __m512i first = _mm512_loadu_si512(a), second = _mm512_loadu_si512(b);
        pairs[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(first, second));
        pairs[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(first, second));
    }
    static void in_order(f16* v) {
        const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
        const f16 first = v[0], second = v[1];
        v[0] = _mm512_permutex2var_ps(first, low, second);
        v[1] = _mm512_permutex2var_ps(first, high, second);
    }
};
#endif

// Panel p of packed weights, of which each multiply-add of a row takes `step` inner values.
template <class Value>
const Value* panel(const Value* weights, int64_t p, int64_t inner, int64_t step) {
    return weights + (p / PAIR * PAIR * inner + p % PAIR * step) * LANES;
}

// Where the panels end that are done together with the first: a pair, or one alone where a range cuts through a pair.
inline int64_t after_panels(int64_t first, int64_t end) { return std::min(end, (first / PAIR + 1) * PAIR); }

inline f16 exponential(f16 x) {  // Cephes' expf: error below 2 ulp; below -87.3 the smallest normal number
    x = _mm512_max_ps(x, _mm512_set1_ps(-87.3f));
    f16 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    f16 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    f16 p = _mm512_set1_ps(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}
