// A row of logits and the order of its tokens: higher logits first, equal ones by ascending id.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "lanes.h"

template <class Value>
struct Row {
    const Value* logits;
    int64_t size;

    __mmask16 real(int64_t v) const { return size - v >= LANES ? 0xffff : (1u << (size - v)) - 1; }
    f16 load(int64_t v) const {  // -inf beyond the vocabulary
        const __mmask16 lanes = real(v);
        return _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), lanes, load_some(logits + v, lanes));
    }
};

template <class Use>
void each_lane(__mmask16 lanes, Use use) {
    for (uint32_t rest = lanes; rest; rest &= rest - 1) use(__builtin_ctz(rest));
}

// A token's place among all tokens of its row as one integer: the greater, the earlier. Those whose logits are not
// numbers come last.
using Rank = uint64_t;

inline Rank rank_of(float logit, uint32_t id) {
    logit += 0.0f;  // -0 ties with +0
    uint32_t bits;
    std::memcpy(&bits, &logit, sizeof bits);
    bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
    if (std::isnan(logit)) bits = 0;
    return static_cast<Rank>(bits) << 32 | ~id;
}

inline uint32_t id_of(Rank rank) { return ~static_cast<uint32_t>(rank); }

inline float logit_of(Rank rank) {
    uint32_t bits = rank >> 32;
    bits ^= bits >> 31 ? 0x80000000u : 0xffffffffu;
    float logit;
    std::memcpy(&logit, &bits, sizeof logit);
    return logit;
}

const Rank LAST = rank_of(-INFINITY, 0xffffffffu);

template <class Value>
Rank highest(Row<Value> row) {
    f16 most[4];
    for (f16& one : most) one = _mm512_set1_ps(-INFINITY);
    int64_t v = 0;
    for (; v + 4 * LANES <= row.size; v += 4 * LANES)  // maximum of (x, most) is `most` where x is not a number
        for (int i = 0; i < 4; ++i) most[i] = _mm512_max_ps(load_some(row.logits + v + i * LANES, 0xffff), most[i]);
    for (; v < row.size; v += LANES) most[0] = _mm512_max_ps(row.load(v), most[0]);
    const f16 pair = _mm512_max_ps(most[0], most[1]), other = _mm512_max_ps(most[2], most[3]);
    const float top = _mm512_reduce_max_ps(_mm512_max_ps(pair, other));
    for (v = 0; v < row.size; v += LANES)
        if (__mmask16 equal = row.real(v) & _mm512_cmp_ps_mask(row.load(v), _mm512_set1_ps(top), _CMP_EQ_OQ))
            return rank_of(top, v + __builtin_ctz(equal));
    return rank_of(top, 0);  // no numbers at all
}

// The k first tokens (all if there are fewer), in order.
template <class Value>
void first_tokens(Row<Value> row, int64_t k, std::vector<Rank>& ranks) {
    const size_t count = std::min(k, row.size), room = 4 * count + 4 * LANES;
    const auto keep = [&] {
        std::nth_element(ranks.begin(), ranks.begin() + (count - 1), ranks.end(), std::greater<>());
        ranks.resize(count);
    };
    ranks.clear();
    f16 edge = _mm512_set1_ps(-INFINITY);
    bool full = false;
    for (int64_t v = 0; v < row.size; v += LANES) {
        const f16 logit = row.load(v);
        // A token that equals the k-th comes after it: its id is greater. Not even the k-th may be a number.
        const __mmask16 enters = row.real(v) & (full ? _mm512_cmp_ps_mask(logit, edge, _CMP_NLE_UQ) : 0xffff);
        if (!enters) continue;
        float values[LANES];
        _mm512_storeu_ps(values, logit);
        each_lane(enters, [&](int i) { ranks.push_back(rank_of(values[i], v + i)); });
        if (ranks.size() < room) continue;
        keep();
        edge = _mm512_set1_ps(logit_of(ranks[count - 1]));
        full = true;
    }
    keep();
    std::sort(ranks.begin(), ranks.end(), std::greater<>());
}

// All tokens with a logit in [low, high], in order.
template <class Value>
void collect(Row<Value> row, float low, float high, std::vector<Rank>& ranks) {
    ranks.clear();
    for (int64_t v = 0; v < row.size; v += LANES) {
        const f16 logit = row.load(v);
        float values[LANES];
        const __mmask16 within = _mm512_cmp_ps_mask(logit, _mm512_set1_ps(low), _CMP_GE_OQ) &
                                 _mm512_cmp_ps_mask(logit, _mm512_set1_ps(high), _CMP_LE_OQ) & row.real(v);
        if (!within) continue;
        _mm512_storeu_ps(values, logit);
        each_lane(within, [&](int i) { ranks.push_back(rank_of(values[i], v + i)); });
    }
    std::sort(ranks.begin(), ranks.end(), std::greater<>());
}
