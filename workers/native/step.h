// What Python hands over for one forward (mirrored by ctypes in decoder.py).

#pragma once

#include <cstdint>

extern "C" {

// What is added to a linear layer: up (down x), with `rank` values between (0: nothing is). A layer that is several in
// one has as many `members`: each its part of `down` [members * rank, inner], and the outputs before end[i], from those
// of the one before it, of `up` [outputs, rank].
struct Patch {
    const void *down, *up;
    int64_t rank, members, end[3];
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

// Rows from `first_auxiliary` on are auxiliary. Row t belongs to a sequence whose keys of layer l, column c are at
// key_base[t] + l * layer_stride[t] + c * K * D, its values value_stride[t] further. It is stored in column[t] and sees
// the columns before contiguous[t] and the columns of the rows seen[seen_begin[t] .. seen_begin[t + 1]), in ascending
// order.
struct Step {
    int64_t rows, first_auxiliary, num_sampled, threads;
    void* const* key_base;
    const int64_t *layer_stride, *value_stride, *column, *contiguous, *position, *seen_begin, *seen, *sampled;
    const float* rotary;  // [positions, 2, D]: cosines, sines
};
}
