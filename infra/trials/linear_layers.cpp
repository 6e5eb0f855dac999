// How long do all linear layers of SmolLM2-135M take by rows, in pages of 4 KiB and of 2 MiB, and what are the peaks?
//
//     g++ -O3 -march=native -std=c++17 -ffp-contract=off -fno-math-errno -fopenmp -w \
//         -I workers/native infra/trials/linear_layers.cpp -o linear_layers && ./linear_layers
//
// For CPUs with AVX512-BF16. Two threads; fewest milliseconds of ROUNDS, the two kinds of pages by turns.

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "linear.h"

using E = BFloat16;
using Value = E::Value;

constexpr int ROUNDS = 12;
constexpr int64_t LARGE_PAGE = 2 << 20;

struct Layer {
    int64_t outputs, inner;
    Value* weights;
};

char* memory(int64_t size, int advice) {
    auto* begin = static_cast<char*>(
        mmap(nullptr, size + LARGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    begin += -reinterpret_cast<uintptr_t>(begin) % LARGE_PAGE;
    madvise(begin, size, advice);
    return begin;
}

std::vector<Layer> model(int advice, int64_t* size) {
    std::vector<Layer> layers;
    for (int l = 0; l < 30; ++l)
        for (auto [outputs, inner] : {std::pair{960, 576}, {576, 576}, {3072, 576}, {576, 1536}})
            layers.push_back({outputs, inner, nullptr});
    layers.push_back({49152, 576, nullptr});
    *size = 0;
    for (auto& layer : layers) *size += layer.outputs * layer.inner * sizeof(Value);
    auto* next = reinterpret_cast<Value*>(memory(*size, advice));
    for (auto& layer : layers) {
        layer.weights = next;
        next += layer.outputs * layer.inner;
        for (auto* w = layer.weights; w < next; ++w) *w = 0x3c00 + ((w - layer.weights) * 7919 & 0x80ff);
    }
    return layers;
}

double forward(const std::vector<Layer>& layers, int64_t rows) {
    static std::vector<Value> x(64 * 1536, 0x3c00), y(64 * 49152);
    const double began = omp_get_wtime();
#pragma omp parallel num_threads(2)
    for (size_t i = 0; i < layers.size(); ++i) {
        const Layer &layer = layers[i], &after = layers[(i + 1) % layers.size()];
        linear<E>(x.data(), rows, layer.inner, layer.weights, nullptr, y.data(), layer.outputs,
                  {after.weights, after.inner, after.outputs});
    }
    return omp_get_wtime() - began;
}

double read(const char* from, int64_t size) {
    const double began = omp_get_wtime();
#pragma omp parallel num_threads(2)
    {
        f16 sum[4] = {};
        for (int64_t i = size / 2 * omp_get_thread_num(), end = i + size / 2; i + 255 < end; i += 256)
            for (int j = 0; j < 4; ++j) {
                _mm_prefetch(from + i + 64 * j + 4096, _MM_HINT_T0);
                sum[j] = _mm512_add_ps(sum[j], _mm512_loadu_ps(from + i + 64 * j));
            }
        for (auto& part : sum) asm volatile("" ::"v"(part));
    }
    return omp_get_wtime() - began;
}

double multiply(int64_t count) {
    const double began = omp_get_wtime();
#pragma omp parallel num_threads(2)
    {
        f16 sum[16] = {}, factor = _mm512_set1_ps(1e-3f);
        for (auto& part : sum) asm volatile("" : "+v"(part));  // else the compiler sees sixteen equal chains, and does one
        for (int64_t i = 0; i < count; i += 16) {
            asm volatile("" : "+v"(factor));
#pragma GCC unroll 16
            for (auto& part : sum) part = E::multiply_add(part, factor, factor);
        }
        for (auto& part : sum) asm volatile("" ::"v"(part));
    }
    return omp_get_wtime() - began;
}

template <class F>
double fewest(F seconds) {
    double best = 1e9;
    for (int i = 0; i < ROUNDS; ++i) best = std::min(best, seconds());
    return best;
}

int main() {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    int64_t size;
    const auto small = model(MADV_NOHUGEPAGE, &size), large = model(MADV_HUGEPAGE, &size);
    auto bandwidth = [&](const auto& layers) {
        return size / 1e9 / fewest([&] { return read(reinterpret_cast<char*>(layers[0].weights), size); });
    };
    const double multiply_ns = fewest([] { return multiply(4000000); }) / 4e6 * 1e9;
    std::printf("read: %.1f and %.1f GB/s; a multiply-add of 32 values: %.3f ns a core, %.2f ms a row\n",
                bandwidth(small), bandwidth(large), multiply_ns, size / sizeof(Value) / 32 / 2 * multiply_ns / 1e6);
    for (int64_t rows : {1, 2, 4, 8, 12, 14, 16, 24, 32, 64}) {
        double best[2] = {1e9, 1e9};
        for (int i = 0; i < ROUNDS; ++i) {
            best[0] = std::min(best[0], forward(small, rows));
            best[1] = std::min(best[1], forward(large, rows));
        }
        std::printf("%2ld rows: %5.2f ms in small pages, %5.2f in large ones\n", long(rows), best[0] * 1e3,
                    best[1] * 1e3);
    }
}
