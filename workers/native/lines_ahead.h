// Memory that is fetched into the second-level cache in small parts, between the arithmetic on what is there already:
// in one go, the fetches would fill the core's queue of misses, and the arithmetic would wait behind them.

#pragma once

#include <immintrin.h>

#include <cstdint>

class LinesAhead {
  public:
    void clear() { waiting = size = done = 0; }

    // Up to three pieces, one after the other: `width` bytes of each of `columns`, which are `stride` bytes apart.
    void add(const void* from, int64_t width, int64_t stride, int64_t columns) {
        if (columns > 0) pieces[size++] = {static_cast<const char*>(from), width, stride, columns};
    }

    // The next cache lines, if so many are left.
    void fetch(int lines) {
        for (; lines > 0 && waiting < size; --lines) {
            Piece& piece = pieces[waiting];
            _mm_prefetch(piece.from + done, _MM_HINT_T1);
            done += LINE;
            if (done < piece.width) continue;
            done = 0;
            piece.from += piece.stride;
            waiting += --piece.columns == 0;
        }
    }

  private:
    static constexpr int64_t LINE = 64;
    struct Piece {
        const char* from;
        int64_t width, stride, columns;
    };
    Piece pieces[3];
    int64_t waiting = 0, size = 0;
    int64_t done = 0;  // bytes of the column in progress
};
