// 16 vectors of 16 floats, rows becoming columns.
#pragma once

#include "lanes.h"

namespace ds {

#if defined(__GNUC__)

// x[i][j] and x[j][i] change places.
DS_INLINE void transpose(Lanes (&x)[kLanes]) {
#if DS_HAS_SHUFFLES  // in four steps: corners of 8 by 8 change places, then in each of these corners of 4 by 4, and so on
#define DS_SWAP(d, ...)                                                                   \
    for (int64_t i = 0; i < kLanes; ++i)                                                  \
        if ((i & d) == 0) {                                                               \
            const Lanes a = x[i], b = x[i + d];                                           \
            x[i] = __builtin_shufflevector(a, b, __VA_ARGS__);                            \
            x[i + d] = __builtin_shufflevector(b, a, DS_OTHER_##d);                       \
        }
#define DS_OTHER_8 24, 25, 26, 27, 28, 29, 30, 31, 8, 9, 10, 11, 12, 13, 14, 15
#define DS_OTHER_4 20, 21, 22, 23, 4, 5, 6, 7, 28, 29, 30, 31, 12, 13, 14, 15
#define DS_OTHER_2 18, 19, 2, 3, 22, 23, 6, 7, 26, 27, 10, 11, 30, 31, 14, 15
#define DS_OTHER_1 17, 1, 19, 3, 21, 5, 23, 7, 25, 9, 27, 11, 29, 13, 31, 15
    DS_SWAP(8, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
    DS_SWAP(4, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
    DS_SWAP(2, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
    DS_SWAP(1, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#undef DS_SWAP
#undef DS_OTHER_8
#undef DS_OTHER_4
#undef DS_OTHER_2
#undef DS_OTHER_1
#else
    Lanes given[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) given[i] = x[i];
    for (int64_t i = 0; i < kLanes; ++i)
        for (int64_t j = 0; j < kLanes; ++j) x[i][j] = given[j][i];
#endif
}

// The same of vectors in registers of N lanes, which do not meet there.
template <int N>
DS_INLINE void transpose(LanesOf<N> (&x)[kLanes]) {
    if constexpr (N == kLanes) {
        Lanes whole[kLanes];
        for (int64_t i = 0; i < kLanes; ++i) whole[i] = x[i].of[0];
        transpose(whole);
        for (int64_t i = 0; i < kLanes; ++i) x[i].of[0] = whole[i];
    } else {
        float given[kLanes][kLanes], turned[kLanes][kLanes];
        for (int64_t i = 0; i < kLanes; ++i) x[i].store(given[i]);
        for (int64_t i = 0; i < kLanes; ++i)
            for (int64_t j = 0; j < kLanes; ++j) turned[i][j] = given[j][i];
        for (int64_t i = 0; i < kLanes; ++i) x[i].load(turned[i]);
    }
}

#endif  // __GNUC__

}  // namespace ds
