// Sums in fp64 in one fixed order: kLanes running sums over the elements of a block, added pairwise, then block by block
// from the start of the tensor. Neither the instruction set nor the number of threads changes a bit.
#pragma once

#include "kernel.h"

namespace ds {

constexpr int kLanes = 16;

// Sum of squares of n fp32 values. Squares of fp32 values are exact in fp64: only the additions round.
DS_INLINE double block_sum_of_squares(const float *__restrict x, int64_t n) {
    double lane[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        DS_IVDEP for (int j = 0; j < kLanes; ++j) lane[j] += double(x[i + j]) * double(x[i + j]);
    }
    for (int j = 0; i + j < n; ++j) lane[j] += double(x[i + j]) * double(x[i + j]);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int j = 0; j < width; ++j) lane[j] += lane[j + width];
    return lane[0];
}

}  // namespace ds
