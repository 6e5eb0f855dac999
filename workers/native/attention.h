// Attention of the rows of a step over their visible columns, which are counted by rank: column c of a row is its j-th
// visible one. Whatever a row is computed beside, its scores, its softmax and its sums over values run by rank in
// blocks of BLOCK, so its result does not depend on the others.
//
// Rows of one sequence form groups that read their common columns once: up to 16 queries of a key head, the height of
// an AMX tile. What a row sees beyond (the rest of its last block, its ancestors in a draft tree) is copied together
// and done for the row alone; rows of a chain need no ancestors, so they go on together: those that see less weigh the
// last columns with zeros, which changes no sum.
//
// Shapes: D head size, Q queries of a group that share a key/value head, C columns.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lanes.h"
#include "lines_ahead.h"
#include "step.h"

constexpr int BLOCK = 32;         // ranks
constexpr int MOST_QUERIES = 16;  // of a group and a key head
constexpr int KEYS_AHEAD = 64;    // columns by which keys are fetched ahead within a task
constexpr int64_t MOST_BYTES_AHEAD = 192 << 10;  // of keys and of values: they wait in the second-level cache

// Rows [first, end) of a step. The ranks before `shared` are the columns from `lowest` on for all of them.
struct Group {
    int64_t first, end, lowest, shared;
};

// Ranks of row t that are the columns from `lowest` on.
inline int64_t in_sequence(const Step& step, int64_t t, int64_t lowest) {
    return std::max<int64_t>(0, step.contiguous[t] - lowest);
}

// Neighbours of one sequence, at most `most` together. The columns that they share differ by a block at most.
inline std::vector<Group> grouped(const Step& step, int64_t window, int64_t most) {
    std::vector<Group> groups;
    for (int64_t t = 0; t < step.rows;) {
        const int64_t lowest = window ? std::max<int64_t>(0, step.position[t] - window + 1) : 0;
        int64_t end = t + 1, least = in_sequence(step, t, lowest) / BLOCK, highest = least;
        for (; end < step.rows && step.key_base[end] == step.key_base[t]; ++end) {
            const int64_t blocks = in_sequence(step, end, lowest) / BLOCK;
            const int64_t other = window ? std::max<int64_t>(0, step.position[end] - window + 1) : 0;
            if (other != lowest || std::max(highest, blocks) > std::min(least, blocks) + 1) break;
            least = std::min(least, blocks);
            highest = std::max(highest, blocks);
        }
        const int64_t parts = (end - t + most - 1) / most, rows = end - t;
        for (int64_t p = 0; p < parts; ++p) {
            Group group{t + rows * p / parts, t + rows * (p + 1) / parts, lowest, INT64_MAX};
            for (int64_t i = group.first; i < group.end; ++i)
                group.shared = std::min(group.shared, in_sequence(step, i, lowest) / BLOCK * BLOCK);
            groups.push_back(group);
        }
        t = end;
    }
    return groups;
}

// Some key/value heads of a group: [first_head, end_head).
struct Task {
    const Group* rows;
    int64_t first_head, end_head;
};

// The attention of one layer, cut into tasks for so many threads: few groups by key/value head and into fewer rows
// each, so that all threads end together; of many, each reads its keys in one stream. To read them takes as long as
// to compute `keys_cost` rows.
class Tasks {
  public:
    Tasks(const Step& step, int64_t window, int64_t most_rows, int64_t keys_cost, int64_t kv_heads,
          int64_t threads)
        : groups(grouped(step, window, most_rows)), kv_heads(kv_heads) {
        if (int64_t(groups.size()) >= 2 * threads) return;
        split = kv_heads;
        auto longest_thread = [&](const std::vector<Group>& some) {
            int64_t rows = 0;
            for (const Group& group : some) rows = std::max(rows, group.end - group.first);
            return (int64_t(some.size()) * split + threads - 1) / threads * (rows + keys_cost);
        };
        for (int64_t most = most_rows - 1; most > 0; --most) {
            std::vector<Group> other = grouped(step, window, most);
            if (longest_thread(other) < longest_thread(groups)) groups = std::move(other);
        }
    }

    int64_t count() const { return groups.size() * split; }

    Task operator[](int64_t i) const {
        const int64_t heads = kv_heads / split, first = i % split * heads;
        return {&groups[i / split], first, first + heads};
    }

  private:
    std::vector<Group> groups;
    int64_t kv_heads, split = 1;
};

// scores[j] -> exp(scores[j] - highest) as E keeps values, at the front of the same memory, 0 from `visible` to the end
// to `padded`; returns 1 / their sum
template <class E>
float softmax(float* scores, int64_t visible, int64_t padded) {
    std::fill(scores + visible, scores + padded, -INFINITY);
    f16 top = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
    for (int64_t j = 0; j < padded; j += LANES) top = _mm512_max_ps(top, _mm512_loadu_ps(scores + j));
    const f16 highest = _mm512_set1_ps(_mm512_reduce_max_ps(top));
    for (int64_t j = 0; j < padded; j += LANES) {
        const int64_t left = visible - j;
        const __mmask16 real = left >= LANES ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
        f16 weight = _mm512_maskz_mov_ps(real, exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + j), highest)));
        total = _mm512_add_ps(total, weight);
        E::store(reinterpret_cast<typename E::Value*>(scores) + j, weight);
    }
    return 1.0f / _mm512_reduce_add_ps(total);
}

// The attention of one group in some key/value heads. `Unit` multiplies: vectors, or tiles.
template <class E, class Unit>
class Attention {
  public:
    using Value = typename E::Value;

    Attention(const Model& model, const Step& step) : model(model), step(step), size(model.head_size) {
        group_size = model.heads / model.kv_heads;
        parts = (group_size + MOST_QUERIES - 1) / MOST_QUERIES;
    }

    // Query heads of part p of key/value head h: [first_query(h, p), first_query(h, p + 1)).
    int64_t first_query(int64_t h, int64_t p) const { return h * group_size + group_size * p / parts; }

    // `near` columns have been fetched already. Returns how many of the next task's, if there is one, are now.
    int64_t operator()(const Task& task, const Task* next, int64_t near, int64_t l, const Value* qkv,
                       int64_t qkv_width, Value* out, int64_t out_width) {
        group = *task.rows;
        first = task.first_head;
        heads = task.end_head - first;
        width = heads * size;
        count = group.end - group.first;
        height = (group_size + parts - 1) / parts * count;
        keys = keys_of(group, l);
        values = keys + step.value_stride[group.first];
        fetched = near;
        const int64_t columns_ahead = plan_ahead(next, l);
        visible.clear();
        for (int64_t t = group.first; t < group.end; ++t) visible.push_back(own_columns(t, nullptr, nullptr));
        longest = std::max_element(visible.begin(), visible.end()) - visible.begin();
        padded = (visible[longest] + BLOCK - 1) / BLOCK * BLOCK;
        chain = step.seen_begin[group.first] == step.seen_begin[group.end];
        scores.resize(heads * parts * height * padded);
        sums.assign(heads * parts * height * size, 0.0f);
        take_queries(qkv, qkv_width);
        score();
        normalizer.resize(heads * parts * height);
        for_each([&](int64_t at, int64_t, int64_t i, int64_t r) {
            normalizer[at + i] = softmax<E>(scores.data() + (at + i) * padded, visible[r], padded);
        });
        add_values();
        for_each([&](int64_t at, int64_t head, int64_t i, int64_t r) {
            const f16 factor = _mm512_set1_ps(normalizer[at + i]);
            Value* to = out + (group.first + r) * out_width + head * size;
            for (int d = 0; d < size; d += 2 * LANES) {
                const float* from = sums.data() + (at + i) * size + d;
                f16 sum[2] = {_mm512_loadu_ps(from), _mm512_loadu_ps(from + LANES)};
                E::in_order(sum);
                for (int v = 0; v < 2; ++v) E::store(to + d + v * LANES, _mm512_mul_ps(sum[v], factor));
            }
        });
        unit.finish();
        return columns_ahead;
    }

    // Rows of a sequence that go together.
    int64_t most_rows() const { return std::max<int64_t>(1, MOST_QUERIES / group_size); }

  private:
    // f(place of the part's first query, key head, queries of a row) of every part of every key head
    template <class F>
    void for_each_part(F f) {
        for (int64_t h = 0; h < heads; ++h)
            for (int64_t p = 0; p < parts; ++p)
                f((h * parts + p) * height, h, first_query(0, p + 1) - first_query(0, p));
    }

    // f(place of the part's first query, query head, place in the part, row of the group) of every query
    template <class F>
    void for_each(F f) {
        for_each_part([&](int64_t at, int64_t h, int64_t queries) {
            const int64_t head = first_query(first + h, at / height % parts);
            for (int64_t r = 0; r < count; ++r)
                for (int64_t g = 0; g < queries; ++g) f(at, head + g, r * queries + g, r);
        });
    }

    // The number of columns that row t sees. Those beyond its whole blocks are copied `to`, if given, zeros behind.
    int64_t own_columns(int64_t t, const Value* from, Value* to) const {
        const int64_t sequence = in_sequence(step, t, group.lowest), whole = sequence / BLOCK * BLOCK;
        int64_t rank = whole;
        auto take = [&](int64_t column) {
            if (to) std::memcpy(to + (rank - whole) * width, at_column(from, column), width * sizeof(Value));
            ++rank;
        };
        while (rank < sequence) take(group.lowest + rank);
        for (int64_t i = step.seen_begin[t]; i < step.seen_begin[t + 1]; ++i)
            if (step.position[step.seen[i]] >= group.lowest) take(step.column[step.seen[i]]);
        if (to) std::fill(to + (rank - whole) * width, to + ((rank + BLOCK - 1) / BLOCK * BLOCK - whole) * width, 0);
        return rank;
    }

    const Value* at_column(const Value* from, int64_t column) const {
        return from + column * model.kv_heads * size + first * size;
    }

    // f(first row of the group, rows, first rank, ranks, their keys or values, distance of columns) for what is seen
    // beyond the shared columns: by one row, or by all of a chain
    template <class F>
    void beyond_shared(const Value* from, F f) {
        const int64_t stride = model.kv_heads * size, together = chain ? count : 1;
        for (int64_t r = 0; r < count; r += together) {
            const int64_t longer = chain ? longest : r, t = group.first + longer;
            const int64_t whole = in_sequence(step, t, group.lowest) / BLOCK * BLOCK;
            if (whole > group.shared)
                f(r, together, group.shared, whole - group.shared, at_column(from, group.lowest + group.shared),
                  stride);
            if (visible[longer] == whole) continue;
            const int64_t rest = (visible[longer] - whole + BLOCK - 1) / BLOCK * BLOCK;
            own.resize(rest * width);
            own_columns(t, from, own.data());
            f(r, together, whole, rest, own.data(), width);
        }
    }

    void take_queries(const Value* qkv, int64_t qkv_width) {
        queries.resize((heads * parts * height + MOST_QUERIES) * size);
        for_each([&](int64_t at, int64_t head, int64_t i, int64_t r) {
            std::memcpy(queries.data() + (at + i) * size, qkv + (group.first + r) * qkv_width + head * size,
                        size * sizeof(Value));
        });
        unit.prepare(queries.data(), heads * parts, height, size);
    }

    const Value* keys_of(const Group& rows, int64_t l) const {
        return static_cast<const Value*>(step.key_base[rows.first]) + l * step.layer_stride[rows.first];
    }

    // What is read of values later, then the next task's keys and values.
    int64_t plan_ahead(const Task* next, int64_t l) {
        const int64_t stride = model.kv_heads * size * sizeof(Value);
        ahead.clear();
        if (group.shared > fetched)
            ahead.add(at_column(values, group.lowest + fetched), width * sizeof(Value), stride, group.shared - fetched);
        if (!next) return 0;
        const Group& rows = *next->rows;
        const int64_t its_width = (next->end_head - next->first_head) * size * sizeof(Value);
        const int64_t columns = std::min(in_sequence(step, rows.first, rows.lowest), MOST_BYTES_AHEAD / its_width);
        const Value* from = keys_of(rows, l) + (rows.lowest * model.kv_heads + next->first_head) * size;
        ahead.add(from, its_width, stride, columns);
        ahead.add(from + step.value_stride[rows.first], its_width, stride, columns);
        return columns;
    }

    void score() {
        const int64_t stride = model.kv_heads * size;
        for (int64_t j = 0; j < group.shared; j += BLOCK) {
            fetch_keys(j);
            for_each_part([&](int64_t at, int64_t h, int64_t n) {
                unit.scores(at, n * count, at_column(keys, group.lowest + j) + h * size, stride, model.scale,
                            scores.data() + at * padded + j, padded, ahead);
            });
        }
        beyond_shared(keys, [&](int64_t r, int64_t rows, int64_t rank, int64_t ranks, auto* from, int64_t step_by) {
            for_each_part([&](int64_t at, int64_t h, int64_t n) {
                for (int64_t j = 0; j < ranks; j += BLOCK)
                    unit.scores(at + r * n, n * rows, from + j * step_by + h * size, step_by, model.scale,
                                scores.data() + (at + r * n) * padded + rank + j, padded, ahead);
            });
        });
    }

    // Too many short streams for the CPU to foresee.
    void fetch_keys(int64_t j) const {
        for (int64_t i = std::max(j, fetched); i < j + BLOCK; ++i) {
            const int64_t later = std::min(i + KEYS_AHEAD, group.shared - 1);
            for (int64_t d = 0; d < width; d += 64 / sizeof(Value))
                _mm_prefetch(at_column(keys, group.lowest + later) + d, _MM_HINT_T0);
        }
    }

    const Value* weights(int64_t query, int64_t rank) const {
        return reinterpret_cast<const Value*>(scores.data() + query * padded) + rank;
    }

    void add_values() {
        const int64_t stride = model.kv_heads * size, weight_stride = padded * sizeof(float) / sizeof(Value);
        for (int64_t j = 0; j < group.shared; j += BLOCK) {
            for_each_part([&](int64_t at, int64_t h, int64_t n) {
                unit.add_values(weights(at, j), weight_stride, n * count,
                                at_column(values, group.lowest + j) + h * size, stride, BLOCK,
                                sums.data() + at * size, ahead);
            });
        }
        beyond_shared(values, [&](int64_t r, int64_t rows, int64_t rank, int64_t ranks, auto* from, int64_t step_by) {
            for_each_part([&](int64_t at, int64_t h, int64_t n) {
                unit.add_values(weights(at + r * n, rank), weight_stride, n * rows, from + h * size, step_by, ranks,
                                sums.data() + (at + r * n) * size, ahead);
            });
        });
    }

    const Model& model;
    const Step& step;
    const int size;
    int64_t group_size, parts;
    Group group;
    int64_t first, heads, width, count, height, padded, longest;
    bool chain;  // no row has ancestors elsewhere
    const Value *keys, *values;
    int64_t fetched;
    LinesAhead ahead;
    std::vector<Value> queries, own;
    std::vector<float> scores, sums, normalizer;
    std::vector<int64_t> visible;
    Unit unit;
};
