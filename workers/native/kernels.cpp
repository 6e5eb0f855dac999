// One forward of a Llama-like decoder over packed rows, for CPUs with AVX-512 (bfloat16 weights need AVX512-BF16).
//
// Every row is computed in an order that does not depend on the other rows: a dot product runs over its inner
// dimension in one chain, a softmax over the visible columns by rank. So a token's logits are bit for bit the same
// alone, in a batch, in a prompt chunk and as a draft row, which is what makes guesses exact in bfloat16 too.
//
// Shapes: T rows of the step, E hidden, H query heads, K key/value heads, G = H / K, D head size, I intermediate,
// N outputs and M rows of a linear layer, S sampled rows, V vocabulary. Weights are packed (see `pack`).

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lanes.h"
#include "linear.h"

namespace {

constexpr int KEYS_AHEAD = 64;  // columns by which attention fetches keys ahead

// ---- the rest of a layer ------------------------------------------------------------------------------------------

// w * rounded(x / rms(x)), one row
template <class E>
void rms_norm(const typename E::Value* x, const typename E::Value* w, int size, float eps, typename E::Value* y) {
    f16 squares = _mm512_setzero_ps();
    for (int i = 0; i < size; i += LANES) {
        f16 v = E::load(x + i);
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    f16 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / size + eps));
    for (int i = 0; i < size; i += LANES)
        E::store(y + i, _mm512_mul_ps(E::load(w + i), E::rounded(_mm512_mul_ps(E::load(x + i), scale))));
}

// rotate half: (a, b) -> (a cos - b sin, b cos + a sin), one head
template <class E>
void rotate(const typename E::Value* x, const float* cos, const float* sin, int size, typename E::Value* y) {
    const int half = size / 2;
    for (int i = 0; i < half; i += LANES) {
        f16 a = E::load(x + i), b = E::load(x + half + i);
        f16 cos_a = _mm512_loadu_ps(cos + i), sin_a = _mm512_loadu_ps(sin + i);
        f16 cos_b = _mm512_loadu_ps(cos + half + i), sin_b = _mm512_loadu_ps(sin + half + i);
        E::store(y + i, _mm512_fmsub_ps(a, cos_a, _mm512_mul_ps(b, sin_a)));
        E::store(y + half + i, _mm512_fmadd_ps(b, cos_b, _mm512_mul_ps(a, sin_b)));
    }
}

template <class E>
void add(typename E::Value* x, const typename E::Value* delta, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) E::store(x + i, _mm512_add_ps(E::load(x + i), E::load(delta + i)));
}

// silu(gate) * up, one row of [gate | up]
template <class E>
void gated(const typename E::Value* gate_up, int size, typename E::Value* y) {
    const f16 one = _mm512_set1_ps(1.0f);
    for (int i = 0; i < size; i += LANES) {
        f16 gate = E::load(gate_up + i);
        f16 decay = exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate));
        f16 silu = E::rounded(_mm512_div_ps(gate, _mm512_add_ps(one, decay)));
        E::store(y + i, _mm512_mul_ps(silu, E::load(gate_up + size + i)));
    }
}

}  // namespace

// ---- what Python hands over (mirrored by ctypes in decoder.py) ------------------------------------------------------

extern "C" {

// What is added to a linear layer: up (down x), with `rank` values between (0: nothing is).
struct Patch {
    const void *down, *up;
    int64_t rank;
};

struct Layer {
    const void *input_norm, *qkv, *qkv_bias, *query_norm, *key_norm, *output, *post_norm, *gate_up, *down;
    Patch qkv_patch, output_patch, gate_up_patch, down_patch;
    int64_t sliding_window;  // 0: none
};

// `adapted` layers and norm run the auxiliary rows of parallel token prediction; null where there is no adapter.
struct Model {
    int64_t layers, hidden, heads, kv_heads, head_size, intermediate, vocabulary;
    float eps, scale;
    const Layer *layer, *adapted;
    const void *final_norm, *adapted_norm, *head;
};

// Rows from `first_auxiliary` on are auxiliary. Row t belongs to a sequence whose keys of layer l, column c are at key_base[t] + l * layer_stride[t] + c * K * D, its
// values value_stride[t] further. It is stored in column[t] and sees the columns before contiguous[t] and the columns
// of the rows seen[seen_begin[t] .. seen_begin[t + 1]), in ascending order.
struct Step {
    int64_t rows, first_auxiliary, num_sampled, threads;
    void* const* key_base;
    const int64_t *layer_stride, *value_stride, *column, *contiguous, *position, *seen_begin, *seen, *sampled;
    const float* rotary;  // [positions, 2, D]: cosines, sines
};
}

namespace {

// Sums over the lanes of 16 vectors, all in the same order: lane j of the result is the sum of v[j].
f16 lane_sums(const f16* v) {
    f16 pairs[8], fours[4], halves[2];
    for (int i = 0; i < 8; ++i)
        pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 4; ++i)
        fours[i] = _mm512_add_ps(_mm512_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], 0x44),
                                 _mm512_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], 0xee));
    for (int i = 0; i < 2; ++i)
        halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88),
                                  _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
                         _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
}

// scores[j] -> exp(scores[j] - highest), 0 beyond `visible`; returns 1 / their sum
float softmax(float* scores, int64_t visible) {
    const int64_t padded = (visible + LANES - 1) / LANES * LANES;
    std::fill(scores + visible, scores + padded, -INFINITY);
    f16 top = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
    for (int64_t j = 0; j < padded; j += LANES) top = _mm512_max_ps(top, _mm512_loadu_ps(scores + j));
    const f16 highest = _mm512_set1_ps(_mm512_reduce_max_ps(top));
    for (int64_t j = 0; j < padded; j += LANES) {
        const __mmask16 real = visible - j >= LANES ? 0xffff : (1u << (visible - j)) - 1;
        f16 weight = _mm512_maskz_mov_ps(real, exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + j), highest)));
        _mm512_storeu_ps(scores + j, weight);
        total = _mm512_add_ps(total, weight);
    }
    return 1.0f / _mm512_reduce_add_ps(total);
}

// out[g, :] = normalizer[g] * sum over j of weight[g, j] value[column[j], :], for GROUP query heads of one value head.
// Weights beyond `visible` are 0.
template <class E, int GROUP>
void weighted_values(const typename E::Value* values, const std::vector<int64_t>& column, int64_t visible,
                     const float* weight, int64_t padded, const float* normalizer, int size, typename E::Value* out) {
    for (int d = 0; d < size; d += 2 * LANES) {
        f16 sum[GROUP][2];
        for (int g = 0; g < GROUP; ++g) sum[g][0] = sum[g][1] = _mm512_setzero_ps();
        for (int64_t j = 0; j < visible; j += E::INNER) {
            const auto* second = values + column[std::min<int64_t>(j + E::INNER - 1, visible - 1)] + d;
            f16 value[2];
            E::side_by_side(values + column[j] + d, second, value);
            for (int g = 0; g < GROUP; ++g) {
                const f16 w = E::everywhere(reinterpret_cast<const typename E::Value*>(weight + g * padded) + j);
                for (int v = 0; v < 2; ++v) sum[g][v] = E::multiply_add(sum[g][v], value[v], w);
            }
        }
        for (int g = 0; g < GROUP; ++g) {
            E::in_order(sum[g]);
            for (int v = 0; v < 2; ++v)
                E::store(out + g * size + d + v * LANES, _mm512_mul_ps(sum[g][v], _mm512_set1_ps(normalizer[g])));
        }
    }
}

// Attention of row t in key/value heads [first_head, end_head). Scores are kept by rank among the visible columns.
template <class E>
void attend(const Model& model, const Step& step, int64_t l, int64_t window, int64_t t, int64_t first_head,
            int64_t end_head, const typename E::Value* queries, typename E::Value* out) {
    static thread_local std::vector<float> scores;
    static thread_local std::vector<int64_t> column;
    const int size = model.head_size, group = model.heads / model.kv_heads;
    const int64_t width = model.kv_heads * size;
    const auto* keys = static_cast<const typename E::Value*>(step.key_base[t]) + l * step.layer_stride[t];
    const auto* values = keys + step.value_stride[t];
    const int64_t lowest = window ? std::max<int64_t>(0, step.position[t] - window + 1) : 0;

    column.clear();
    for (int64_t c = lowest; c < step.contiguous[t]; ++c) column.push_back(c * width);
    for (int64_t i = step.seen_begin[t]; i < step.seen_begin[t + 1]; ++i)
        if (step.position[step.seen[i]] >= lowest) column.push_back(step.column[step.seen[i]] * width);
    const int64_t visible = column.size(), padded = (visible + LANES - 1) / LANES * LANES;
    scores.resize(group * (end_head - first_head) * padded);

    const f16 scale = _mm512_set1_ps(model.scale);
    const auto line = 64 / sizeof(typename E::Value);
    for (int64_t j = 0; j < visible; j += LANES) {
        const int count = std::min<int64_t>(LANES, visible - j);
        // The values are read next, and the keys a little later: too many short streams for the CPU to foresee.
        for (int64_t i = j; i < std::min(j + LANES, visible); ++i) {
            const int64_t later = column[std::min(i + KEYS_AHEAD, visible - 1)];
            for (int64_t d = first_head * size; d < end_head * size; d += line) {
                _mm_prefetch(values + column[i] + d, _MM_HINT_T1);
                _mm_prefetch(keys + later + d, _MM_HINT_T0);
            }
        }
        for (int64_t h = first_head; h < end_head; ++h)
            for (int g = 0; g < group; ++g) {
                const auto* query = queries + (h * group + g) * size;
                f16 sum[LANES];
                for (int i = 0; i < LANES; ++i) {
                    sum[i] = _mm512_setzero_ps();
                    if (i >= count) continue;
                    const auto* key = keys + column[j + i] + h * size;
                    for (int d = 0; d < size; d += LANES * E::INNER) sum[i] = E::dot_part(sum[i], query + d, key + d);
                }
                _mm512_storeu_ps(scores.data() + ((h - first_head) * group + g) * padded + j,
                                 _mm512_mul_ps(lane_sums(sum), scale));
            }
    }
    for (int64_t h = first_head; h < end_head; ++h)
        for (int g = 0; g < group;) {
            float* weight = scores.data() + ((h - first_head) * group + g) * padded;
            const auto* value = values + h * size;
            auto* result = out + (h * group + g) * size;
            const int count = group - g >= 4 ? 4 : group - g;
            float normalizer[4];
            for (int i = 0; i < count; ++i) {
                normalizer[i] = softmax(weight + i * padded, visible);
                E::narrow(weight + i * padded, padded);
            }
            switch (count) {
                case 1: weighted_values<E, 1>(value, column, visible, weight, padded, normalizer, size, result); break;
                case 2: weighted_values<E, 2>(value, column, visible, weight, padded, normalizer, size, result); break;
                case 3: weighted_values<E, 3>(value, column, visible, weight, padded, normalizer, size, result); break;
                default: weighted_values<E, 4>(value, column, visible, weight, padded, normalizer, size, result);
            }
            g += count;
        }
}

// Normalise (where the model does) and rotate the queries in place, put keys and values where they are kept.
template <class E>
void place(const Model& model, const Layer& layer, const Step& step, int64_t l, int64_t t, typename E::Value* qkv) {
    using Value = typename E::Value;
    const int size = model.head_size;
    const float *cos = step.rotary + step.position[t] * 2 * size, *sin = cos + size;
    Value* key_out = static_cast<Value*>(step.key_base[t]) + l * step.layer_stride[t] +
                     step.column[t] * model.kv_heads * size;
    for (int64_t h = 0; h < model.heads + model.kv_heads; ++h) {
        Value* x = qkv + h * size;
        const bool is_query = h < model.heads;
        const void* norm = is_query ? layer.query_norm : layer.key_norm;
        if (norm) rms_norm<E>(x, static_cast<const Value*>(norm), size, model.eps, x);
        rotate<E>(x, cos, sin, size, is_query ? x : key_out + (h - model.heads) * size);
    }
    std::memcpy(key_out + step.value_stride[t], qkv + (model.heads + model.kv_heads) * size,
                model.kv_heads * size * sizeof(Value));
}

// One linear layer for all rows: the auxiliary ones with the adapted weights, or with what is added to the shared ones.
template <class E>
struct Projection {
    const Step& step;
    std::vector<typename E::Value> low, added;

    void operator()(const typename E::Value* x, int64_t inner, const void* w, const void* bias, const void* adapted,
                    const void* adapted_bias, const Patch& patch, typename E::Value* y, int64_t outputs) {
        auto weights = [](const void* p) { return static_cast<const typename E::Value*>(p); };
        const int64_t rows = step.rows, first = step.first_auxiliary, auxiliary = rows - first;
        const bool shared = w == adapted;
        linear<E>(x, shared ? rows : first, inner, weights(w), weights(bias), y, outputs, step.threads);
        if (auxiliary == 0) return;
        const auto* its_x = x + first * inner;
        auto* its_y = y + first * outputs;
        if (!shared)
            linear<E>(its_x, auxiliary, inner, weights(adapted), weights(adapted_bias), its_y, outputs, step.threads);
        if (patch.rank == 0) return;
        low.resize(auxiliary * patch.rank);
        added.resize(auxiliary * outputs);
        linear<E>(its_x, auxiliary, inner, weights(patch.down), nullptr, low.data(), patch.rank, step.threads);
        linear<E>(low.data(), auxiliary, patch.rank, weights(patch.up), nullptr, added.data(), outputs, step.threads);
        add<E>(its_y, added.data(), auxiliary * outputs);
    }
};

template <class E>
void forward(const Model& model, const Step& step, typename E::Value* hidden, typename E::Value* logits) {
    using Value = typename E::Value;
    const int64_t rows = step.rows, width = model.hidden, D = model.head_size, I = model.intermediate;
    const int64_t query_width = model.heads * D, qkv_width = query_width + 2 * model.kv_heads * D;
    const int threads = step.threads;
    auto weights = [](const void* p) { return static_cast<const Value*>(p); };
    std::vector<Value> normed(std::max(rows, step.num_sampled) * width), qkv(rows * qkv_width),
        attended(rows * query_width), gate_up(rows * 2 * I), inner(rows * I), delta(rows * width);
    Projection<E> project{step, {}, {}};
    const int few = rows < 4 ? 1 : threads;  // waking a thread costs more than a few rows of these

    for (int64_t l = 0; l < model.layers; ++l) {
        const Layer& base = model.layer[l];
        const Layer& adapted = model.adapted ? model.adapted[l] : base;
        auto of_row = [&](int64_t t) -> const Layer& { return t < step.first_auxiliary ? base : adapted; };
#pragma omp parallel for num_threads(few) schedule(static)
        for (int64_t t = 0; t < rows; ++t) {
            if (l > 0) add<E>(hidden + t * width, delta.data() + t * width, width);
            rms_norm<E>(hidden + t * width, weights(of_row(t).input_norm), width, model.eps, normed.data() + t * width);
        }
        project(normed.data(), width, base.qkv, base.qkv_bias, adapted.qkv, adapted.qkv_bias, adapted.qkv_patch,
                qkv.data(), qkv_width);
#pragma omp parallel num_threads(threads)
        {
#pragma omp for schedule(static)
            for (int64_t t = 0; t < rows; ++t) place<E>(model, of_row(t), step, l, t, qkv.data() + t * qkv_width);
            // Few rows: one task per key/value head. Many: one per row, which reads its keys in one stream.
            const int64_t split = rows < 2 * threads ? model.kv_heads : 1, heads = model.kv_heads / split;
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < rows * split; ++i) {
                const int64_t t = i / split, h = i % split * heads;
                attend<E>(model, step, l, base.sliding_window, t, h, h + heads, qkv.data() + t * qkv_width,
                          attended.data() + t * query_width);
            }
        }
        project(attended.data(), query_width, base.output, nullptr, adapted.output, nullptr, adapted.output_patch,
                delta.data(), width);
#pragma omp parallel for num_threads(few) schedule(static)
        for (int64_t t = 0; t < rows; ++t) {
            add<E>(hidden + t * width, delta.data() + t * width, width);
            rms_norm<E>(hidden + t * width, weights(of_row(t).post_norm), width, model.eps, normed.data() + t * width);
        }
        project(normed.data(), width, base.gate_up, nullptr, adapted.gate_up, nullptr, adapted.gate_up_patch,
                gate_up.data(), 2 * I);
#pragma omp parallel for num_threads(few) schedule(static)
        for (int64_t t = 0; t < rows; ++t) gated<E>(gate_up.data() + t * 2 * I, I, inner.data() + t * I);
        project(inner.data(), I, base.down, nullptr, adapted.down, nullptr, adapted.down_patch, delta.data(), width);
    }
    for (int64_t s = 0; s < step.num_sampled; ++s) {
        const int64_t t = step.sampled[s];
        Value* row = normed.data() + s * width;
        std::memcpy(row, hidden + t * width, width * sizeof(Value));
        add<E>(row, delta.data() + t * width, width);
        const void* norm = t < step.first_auxiliary ? model.final_norm : model.adapted_norm;
        rms_norm<E>(row, weights(norm), width, model.eps, row);
    }
    linear<E>(normed.data(), step.num_sampled, width, weights(model.head), nullptr, logits, model.vocabulary, threads);
}

}  // namespace

extern "C" {

void forward_float32(const Model* model, const Step* step, float* hidden, float* logits) {
    forward<Float32>(*model, *step, hidden, logits);
}

#ifdef __AVX512BF16__
void forward_bfloat16(const Model* model, const Step* step, uint16_t* hidden, uint16_t* logits) {
    forward<BFloat16>(*model, *step, hidden, logits);
}
#endif
}
