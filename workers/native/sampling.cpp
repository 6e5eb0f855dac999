// Picks a token from each row of logits, and ranks a row's best tokens, for CPUs with AVX-512.
//
// One thread handles a row from start to end, so a pick does not depend on the other rows or the number of threads.
// Logits are read as they are and widened to float32 in registers; logits that are not numbers are never picked.
//
// Kept tokens (top-k, top-p, min-p) are those that do not come after an edge in the order: higher logits first, equal
// ones by ascending id. So nothing is sorted but the few tokens around an edge.
//
// Shapes: R rows, V vocabulary.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "lanes.h"
#include "noise.h"
#include "ranks.h"

extern "C" {

// Mirrored by ctypes in sampling.py. `stride` is the distance of rows in values.
struct Logits {
    const void* values;
    int64_t rows, stride, vocabulary, threads;
};

struct Sampling {
    int64_t top_k, inverse_cdf;  // 0: off
    float temperature;
    double top_p, min_p;
};
}

namespace {

constexpr float GUMBEL_MOST = 23.0f;   // above the largest noise, -log(-log1p(-2^-33))
constexpr float NEGLIGIBLE = -30.0f;   // a vocabulary of exp(-30) is nothing beside float32's rounding
constexpr float NO_MASS = -87.0f;      // float32 has no exp of less
constexpr int FEW = 64;                // tokens that hold top-p's mass in most rows

// ---- kept tokens ----------------------------------------------------------------------------------------------------

f16 scaled(f16 logit, float temperature) {  // divisions are slow
    return temperature == 1.0f ? logit : _mm512_div_ps(logit, _mm512_set1_ps(temperature));
}

// Sum of exp(logit / temperature - top): the softmax's denominator. Short sums in float32 enter a float64 one:
// bfloat16 logits repeat few values, whose rounding errors would not cancel in a long sum.
template <class Value>
double total_mass(Row<Value> row, float temperature, float top) {
    constexpr int64_t SHORT = 16 * LANES;
    const f16 highest = _mm512_set1_ps(top), least = _mm512_set1_ps(NEGLIGIBLE);
    __m512d total = _mm512_setzero_pd();
    for (int64_t begin = 0; begin < row.size; begin += SHORT) {
        f16 sum = _mm512_setzero_ps();
        const auto add = [&](f16 logit) {
            const f16 x = _mm512_sub_ps(scaled(logit, temperature), highest);
            sum = _mm512_mask_add_ps(sum, _mm512_cmp_ps_mask(x, least, _CMP_GT_OQ), sum, exponential(x));
        };
        if (row.size - begin >= SHORT)
            for (int64_t v = begin; v < begin + SHORT; v += LANES) add(load_some(row.logits + v, 0xffff));
        else
            for (int64_t v = begin; v < row.size; v += LANES) add(row.load(v));
        total = _mm512_add_pd(total, _mm512_cvtps_pd(_mm512_castps512_ps256(sum)));
        total = _mm512_add_pd(total, _mm512_cvtps_pd(_mm512_extractf32x8_ps(sum, 1)));
    }
    return _mm512_reduce_add_pd(total);
}

// Adds the mass of tokens in order to `before` until it reaches `enough`; returns the last one kept, or LAST if it
// does not.
Rank crossing(const std::vector<Rank>& ranks, float temperature, float top, double before, double enough) {
    for (Rank rank : ranks) {
        before += std::exp(static_cast<double>(logit_of(rank) / temperature - top));
        if (before >= enough) return rank;
    }
    return LAST;
}

// The same over all tokens of a flat row: by the mass of each of 65,536 ranges of logits, then within one range.
template <class Value>
Rank crossing_of_flat(Row<Value> row, float temperature, float top, double enough, std::vector<Rank>& ranks) {
    constexpr int SHIFT = 48;
    std::vector<double> mass(1 << (64 - SHIFT));
    for (int64_t v = 0; v < row.size; v += LANES) {
        const f16 logit = row.load(v);
        const f16 x = _mm512_sub_ps(scaled(logit, temperature), _mm512_set1_ps(top));
        float logits[LANES], masses[LANES];
        _mm512_storeu_ps(logits, logit);
        _mm512_storeu_ps(masses, exponential(x));
        each_lane(_mm512_cmp_ps_mask(x, _mm512_set1_ps(NEGLIGIBLE), _CMP_GT_OQ),
                  [&](int i) { mass[rank_of(logits[i], v + i) >> SHIFT] += masses[i]; });
    }
    double before = 0.0;
    int64_t range = mass.size() - 1;
    while (range >= 0 && before + mass[range] < enough) before += mass[range--];
    if (range < 0) return LAST;
    const Rank low = static_cast<Rank>(range) << SHIFT, high = low | ((1ull << SHIFT) - 1);
    collect(row, logit_of(low), logit_of(high), ranks);
    const Rank edge = crossing(ranks, temperature, top, before, enough);
    return edge == LAST ? ranks.back() : edge;
}

// The last token that top-k and top-p keep.
template <class Value>
Rank edge_of(Row<Value> row, const Sampling& sampling, float top, std::vector<Rank>& ranks) {
    const float temperature = sampling.temperature;
    const bool nucleus = sampling.top_p < 1.0;
    if (sampling.top_k > 0 && sampling.top_k < row.size) {
        first_tokens(row, sampling.top_k, ranks);
        const float edge = logit_of(ranks.back());
        const Rank last = std::max(LAST, rank_of(edge, 0xffffffffu));  // all that tie with the k-th are kept
        if (!nucleus) return last;
        collect(row, edge, INFINITY, ranks);
        double total = 0.0;
        for (Rank rank : ranks) total += std::exp(static_cast<double>(logit_of(rank) / temperature - top));
        return std::max(last, crossing(ranks, temperature, top, 0.0, total * sampling.top_p));
    }
    if (!nucleus) return LAST;
    const double enough = total_mass(row, temperature, top) * sampling.top_p;
    first_tokens(row, FEW, ranks);
    const Rank edge = crossing(ranks, temperature, top, 0.0, enough);
    return edge == LAST ? crossing_of_flat(row, temperature, top, enough, ranks) : edge;
}

// Calls use(id of lane 0, lanes, x = logit / temperature) with the kept tokens in [v, end) that reach `bound()` in x.
template <class Value, class Bound, class Use>
void each_kept(Row<Value> row, int64_t v, int64_t end, float temperature, Rank edge, Bound bound, Use use) {
    const f16 edge_logit = _mm512_set1_ps(logit_of(edge));
    const uint32_t edge_id = id_of(edge);
    for (; v < end; v += LANES) {
        const f16 logit = row.load(v);
        __mmask16 kept = _mm512_cmp_ps_mask(logit, edge_logit, _CMP_GE_OQ);
        if (!kept) continue;
        if (v + LANES > edge_id) kept &= ~(_mm512_cmp_ps_mask(logit, edge_logit, _CMP_EQ_OQ) &
                                          (v > edge_id ? 0xffff : 0xffff << (edge_id - v + 1)));
        const f16 x = scaled(logit, temperature);
        kept &= _mm512_cmp_ps_mask(x, _mm512_set1_ps(bound()), _CMP_GE_OQ);
        if (kept) use(v, kept & row.real(v), x);
    }
}

// ---- picks ----------------------------------------------------------------------------------------------------------

// argmax of x + noise. The token with the highest logit goes first, so that few others need their logarithms: with
// noise above d goes u < exp(-d), and the exponent of u alone tells which cannot be.
template <class Value>
int64_t pick_gumbel(Row<Value> row, float temperature, Rank edge, Rank top, float floor, uint64_t stream) {
    uint32_t token = id_of(top);
    float first[LANES];
    _mm512_storeu_ps(first, uniforms(stream, token));
    double best = static_cast<double>(logit_of(top) / temperature) + gumbel(first[0]);
    float near_best, bound;  // `near_best` is lower by more than rounding
    const auto raise = [&] {
        near_best = static_cast<float>(best - 1e-3 - 1e-6 * std::abs(best));
        bound = std::max(floor, near_best - GUMBEL_MOST);
    };
    raise();
    each_kept(row, 0, row.size, temperature, edge, [&] { return bound; }, [&](int64_t v, __mmask16 kept, f16 x) {
        const f16 u = uniforms(stream, v);
        const f16 log_u = _mm512_mul_ps(_mm512_getexp_ps(u), _mm512_set1_ps(0.693147f));
        kept &= _mm512_cmp_ps_mask(log_u, _mm512_sub_ps(x, _mm512_set1_ps(near_best)), _CMP_LE_OQ);
        if (!kept) return;
        float xs[LANES], us[LANES];
        _mm512_storeu_ps(xs, x);
        _mm512_storeu_ps(us, u);
        each_lane(kept, [&](int i) {
            const double score = static_cast<double>(xs[i]) + gumbel(us[i]);
            const uint32_t id = v + i;
            if (score > best || (score == best && id < token)) best = score, token = id;
        });
        raise();
    });
    return token;
}

// The first kept token, by id, whose share of the mass together with all before it exceeds u, and that interval.
//
// A first pass tells which block of tokens that is. All sums of what lies before a token are the same whoever asks: the
// last token of a block ends where the block does, so that intervals touch.
template <class Value>
int64_t pick_inverse_cdf(Row<Value> row, float temperature, Rank edge, Rank top, float floor, uint64_t stream,
                         double* interval) {
    constexpr int64_t BLOCK = 16 * LANES;
    static thread_local std::vector<double> ends;  // mass up to the end of each block
    ends.clear();
    const f16 highest = _mm512_set1_ps(logit_of(top) / temperature);
    const float least = std::max(floor, logit_of(top) / temperature + NO_MASS);
    const auto each_mass = [&](int64_t begin, auto use) {
        each_kept(row, begin, std::min(row.size, begin + BLOCK), temperature, edge, [&] { return least; },
                  [&](int64_t v, __mmask16 kept, f16 x) {
                      use(v, kept, _mm512_maskz_mov_ps(kept, exponential(_mm512_sub_ps(x, highest))));
                  });
    };
    double sum = 0.0;
    for (int64_t begin = 0; begin < row.size; begin += BLOCK) {
        __m512d total = _mm512_setzero_pd();
        each_mass(begin, [&](int64_t, __mmask16, f16 mass) {
            total = _mm512_add_pd(total, _mm512_cvtps_pd(_mm512_castps512_ps256(mass)));
            total = _mm512_add_pd(total, _mm512_cvtps_pd(_mm512_extractf32x8_ps(mass, 1)));
        });
        ends.push_back(sum += _mm512_reduce_add_pd(total));
    }
    const double u = uniform(stream);
    const auto above = [&](double u, double part) { return u < part / sum; };
    const int64_t block = std::upper_bound(ends.begin(), ends.end() - 1, u, above) - ends.begin();
    double before = block ? ends[block - 1] : 0.0, after = before;
    uint32_t token = id_of(top), last = token;
    each_mass(block * BLOCK, [&](int64_t v, __mmask16 kept, f16 mass) {
        float masses[LANES];
        _mm512_storeu_ps(masses, mass);
        each_lane(kept, [&](int i) {
            last = v + i;
            if (above(u, after)) return;  // found
            before = after, after += masses[i], token = v + i;
        });
    });
    if (token == last) after = ends[block];  // not what rounding made of the same sum
    interval[0] = before / sum, interval[1] = after / sum;
    return token;
}

template <class Value>
int64_t pick(Row<Value> row, const Sampling& sampling, const int64_t* stream, double* interval) {
    static thread_local std::vector<Rank> ranks;
    const Rank top = highest(row);
    if (interval) interval[0] = 0.0, interval[1] = 1.0;
    if (sampling.temperature == 0.0f || std::isinf(logit_of(top))) return id_of(top);
    const float most = logit_of(top) / sampling.temperature;
    const Rank edge = edge_of(row, sampling, most, ranks);
    const float floor = most + static_cast<float>(std::log(sampling.min_p));  // -inf without min-p
    return sampling.inverse_cdf
               ? pick_inverse_cdf(row, sampling.temperature, edge, top, floor, *stream, interval)
               : pick_gumbel(row, sampling.temperature, edge, top, floor, *stream);
}

template <class Value, class Use>
void each_row(const Logits& logits, Use use) {
    const auto* values = static_cast<const Value*>(logits.values);
#pragma omp parallel for num_threads(logits.threads) schedule(dynamic) if (logits.rows > 1)
    for (int64_t r = 0; r < logits.rows; ++r) use(r, Row<Value>{values + r * logits.stride, logits.vocabulary});
}

template <class Value>
void pick_rows(const Logits& logits, const Sampling& sampling, const int64_t* streams, int64_t* tokens,
               double* intervals) {
    each_row<Value>(logits, [&](int64_t r, Row<Value> row) {
        tokens[r] = pick(row, sampling, streams + r, intervals ? intervals + 2 * r : nullptr);
    });
}

// The k best tokens of each row with their probabilities at temperature 1.
template <class Value>
void best_of_rows(const Logits& logits, int64_t k, int64_t* ids, float* probabilities) {
    each_row<Value>(logits, [&](int64_t r, Row<Value> row) {
        static thread_local std::vector<Rank> ranks;
        first_tokens(row, k, ranks);
        const float top = logit_of(ranks[0]);
        const double total = total_mass(row, 1.0f, top);
        for (int64_t i = 0; i < k; ++i) {
            ids[r * k + i] = id_of(ranks[i]);
            probabilities[r * k + i] = std::exp(static_cast<double>(logit_of(ranks[i]) - top)) / total;
        }
    });
}

}  // namespace

extern "C" {

void pick_float32(const Logits& l, const Sampling& s, const int64_t* streams, int64_t* tokens, double* intervals) {
    pick_rows<float>(l, s, streams, tokens, intervals);
}

void pick_bfloat16(const Logits& l, const Sampling& s, const int64_t* streams, int64_t* tokens, double* intervals) {
    pick_rows<uint16_t>(l, s, streams, tokens, intervals);
}

// keys [R, 2]
void noise_streams(int64_t rows, const uint64_t* keys, const int64_t* indices, uint64_t* streams) {
    for (int64_t r = 0; r < rows; ++r) streams[r] = stream_of(keys + 2 * r, indices[r]);
}

void best_float32(const Logits& l, int64_t k, int64_t* ids, float* p) { best_of_rows<float>(l, k, ids, p); }

void best_bfloat16(const Logits& l, int64_t k, int64_t* ids, float* p) { best_of_rows<uint16_t>(l, k, ids, p); }
}
