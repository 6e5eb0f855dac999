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
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "amx_attention.h"
#include "attention.h"
#include "lanes.h"
#include "linear.h"
#include "step.h"
#include "vector_attention.h"

namespace {

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
    using Value = typename E::Value;
    const Step& step;
    std::vector<Value> low, added;  // of the auxiliary rows

    Projection(const Model& model, const Step& step) : step(step) {
        const int64_t auxiliary = step.rows - step.first_auxiliary;
        if (auxiliary == 0) return;
        int64_t rank = 0;
        for (int64_t l = 0; l < model.layers; ++l) {
            const Layer& layer = model.adapted[l];
            for (auto* patch : {&layer.qkv_patch, &layer.output_patch, &layer.gate_up_patch, &layer.down_patch})
                rank = std::max(rank, patch->rank * patch->members);
        }
        const int64_t qkv_width = (model.heads + 2 * model.kv_heads) * model.head_size;
        low.resize(auxiliary * rank);
        if (rank) added.resize(auxiliary * std::max({qkv_width, model.hidden, 2 * model.intermediate}));
    }

    // Called by all threads of a team. Each adds to the outputs that it has computed itself: no wait but for `low`.
    void operator()(const Value* x, int64_t inner, const void* w, const void* bias, const void* adapted,
                    const void* adapted_bias, const Patch& patch, Value* y, int64_t outputs, const Next& next) {
        const int64_t rows = step.rows, first = step.first_auxiliary, auxiliary = rows - first;
        const bool shared = w == adapted;
        const Share share(outputs);
        const auto* its_x = x + first * inner;
        auto* its_y = y + first * outputs;
        if (auxiliary) go_down(its_x, inner, patch);
        linear_share<E>(x, shared ? rows : first, inner, weights(w), weights(bias), y, outputs, share, next);
        if (!shared)
            linear_share<E>(its_x, auxiliary, inner, weights(adapted), weights(adapted_bias), its_y, outputs, share);
#pragma omp barrier
        if (auxiliary == 0 || patch.rank == 0) return;
        go_up(patch, outputs, share);
        for (int64_t t = 0; t < auxiliary; ++t) {
            const int64_t begin = t * outputs + share.begin * LANES;
            add<E>(its_y + begin, added.data() + begin, (share.end - share.begin) * LANES);
        }
#pragma omp barrier
    }

  private:
    static const Value* weights(const void* p) { return static_cast<const Value*>(p); }

    Value* low_of(int64_t member, const Patch& patch) {
        return low.data() + member * (step.rows - step.first_auxiliary) * patch.rank;
    }

    void go_down(const Value* x, int64_t inner, const Patch& patch) {
        for (int64_t i = 0; i < patch.members; ++i)
            linear_share<E>(x, step.rows - step.first_auxiliary, inner, weights(patch.down) + i * patch.rank * inner,
                            nullptr, low_of(i, patch), patch.rank, Share(patch.rank));
    }

    void go_up(const Patch& patch, int64_t outputs, const Share& share) {
        for (int64_t i = 0; i < patch.members; ++i) {
            const int64_t begin = i ? patch.end[i - 1] / LANES : 0, end = patch.end[i] / LANES;
            const Share own(std::max(begin, share.begin), std::min(end, share.end));
            linear_share<E>(low_of(i, patch), step.rows - step.first_auxiliary, patch.rank, weights(patch.up), nullptr,
                            added.data(), outputs, own);
        }
    }
};

template <class E, class Unit>
void forward(const Model& model, const Step& step, typename E::Value* hidden, typename E::Value* logits) {
    using Value = typename E::Value;
    const int64_t rows = step.rows, width = model.hidden, D = model.head_size, I = model.intermediate;
    const int64_t query_width = model.heads * D, qkv_width = query_width + 2 * model.kv_heads * D;
    const int threads = step.threads;
    auto weights = [](const void* p) { return static_cast<const Value*>(p); };
    std::vector<Value> normed(std::max(rows, step.num_sampled) * width), qkv(rows * qkv_width),
        attended(rows * query_width), gate_up(rows * 2 * I), inner(rows * I), delta(rows * width);
    Projection<E> project(model, step);
    std::vector<std::atomic<int64_t>> taken(model.layers);  // tasks of a layer beyond the first of each thread
    const Next head{model.head, width, step.num_sampled ? model.vocabulary : 0};

// One team for the whole forward: its threads wait for each other after each part, which costs less than a new team.
#pragma omp parallel num_threads(threads)
    {
        Attention<E, Unit> attend(model, step);
        std::optional<Tasks> tasks;
        const int64_t team = omp_get_num_threads();
        for (int64_t l = 0; l < model.layers; ++l) {
            const Layer& base = model.layer[l];
            const Layer& adapted = model.adapted ? model.adapted[l] : base;
            auto of_row = [&](int64_t t) -> const Layer& { return t < step.first_auxiliary ? base : adapted; };
            auto add_and_norm = [&](int64_t t, bool adds, const void* norm) {
                if (adds) add<E>(hidden + t * width, delta.data() + t * width, width);
                rms_norm<E>(hidden + t * width, weights(norm), width, model.eps, normed.data() + t * width);
            };
#pragma omp for schedule(static)
            for (int64_t t = 0; t < rows; ++t) add_and_norm(t, l > 0, of_row(t).input_norm);
            project(normed.data(), width, base.qkv, base.qkv_bias, adapted.qkv, adapted.qkv_bias, adapted.qkv_patch,
                    qkv.data(), qkv_width, {base.output, query_width, width});
#pragma omp for schedule(static)
            for (int64_t t = 0; t < rows; ++t) place<E>(model, of_row(t), step, l, t, qkv.data() + t * qkv_width);
            if (l == 0 || base.sliding_window != model.layer[l - 1].sliding_window)
                tasks.emplace(step, base.sliding_window, attend.most_rows(), Unit::KEYS_COST, model.kv_heads, team);
            // A thread takes its next task before it does one, so that it can fetch ahead.
            int64_t near = 0;
            for (int64_t i = omp_get_thread_num(), later; i < tasks->count(); i = later) {
                later = team + taken[l].fetch_add(1, std::memory_order_relaxed);
                const Task next = later < tasks->count() ? (*tasks)[later] : Task{};
                near = attend((*tasks)[i], next.rows ? &next : nullptr, near, l, qkv.data(), qkv_width,
                              attended.data(), query_width);
            }
#pragma omp barrier
            project(attended.data(), query_width, base.output, nullptr, adapted.output, nullptr, adapted.output_patch,
                    delta.data(), width, {base.gate_up, width, 2 * I});
#pragma omp for schedule(static)
            for (int64_t t = 0; t < rows; ++t) add_and_norm(t, true, of_row(t).post_norm);
            project(normed.data(), width, base.gate_up, nullptr, adapted.gate_up, nullptr, adapted.gate_up_patch,
                    gate_up.data(), 2 * I, {base.down, I, width});
#pragma omp for schedule(static)
            for (int64_t t = 0; t < rows; ++t) gated<E>(gate_up.data() + t * 2 * I, I, inner.data() + t * I);
            project(inner.data(), I, base.down, nullptr, adapted.down, nullptr, adapted.down_patch, delta.data(),
                    width, l + 1 < model.layers ? Next{model.layer[l + 1].qkv, width, qkv_width} : head);
        }
#pragma omp for schedule(static)
        for (int64_t s = 0; s < step.num_sampled; ++s) {
            const int64_t t = step.sampled[s];
            Value* row = normed.data() + s * width;
            std::memcpy(row, hidden + t * width, width * sizeof(Value));
            add<E>(row, delta.data() + t * width, width);
            rms_norm<E>(row, weights(t < step.first_auxiliary ? model.final_norm : model.adapted_norm), width,
                        model.eps, row);
        }
        linear<E>(normed.data(), step.num_sampled, width, weights(model.head), nullptr, logits, model.vocabulary);
    }
}

}  // namespace

extern "C" {

void forward_float32(const Model* model, const Step* step, float* hidden, float* logits) {
    forward<Float32, Vectors<Float32>>(*model, *step, hidden, logits);
}

#ifdef __AVX512BF16__
void forward_bfloat16(const Model* model, const Step* step, uint16_t* hidden, uint16_t* logits) {
#ifdef __AMX_BF16__
    if (amx::granted()) return forward<BFloat16, amx::Tiles>(*model, *step, hidden, logits);
#endif
    forward<BFloat16, Vectors<BFloat16>>(*model, *step, hidden, logits);
}
#endif
}
