// What products.cpp and the kernels of each instruction set share (products_*.cpp; one file for each, as they take long to
// compile).
#pragma once

#include <type_traits>

#include "lanes.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define DS_PRODUCT_SETS 1
#endif

namespace ds::products {

constexpr int64_t kExactColumns = 16384;
constexpr int64_t kLine = 64;

// One matrix with the inputs.
struct Work {
    const char *matrix;
    const float *scales;
    const void *bias;
    const char *inputs; // rows of input_bytes
    const float *input_scales;
    char *output; // of the matrix's first output
    int64_t row_bytes, input_bytes, rows, columns, group, groups, output_stride;
    int64_t ahead;    // bytes between the weights in use and those asked of the memory: whole tiles
    int64_t raise_at; // of the inputs' bytes: where the raise of the weights is, see [Note: sums of bytes]
    int32_t bias_dtype, output_dtype;
};

DS_INLINE float number_at(const void *base, int32_t dtype, int64_t index) {
    if (dtype == DS_FLOAT32) return static_cast<const float *>(base)[index];
    const uint16_t bits = static_cast<const uint16_t *>(base)[index];
    return dtype == DS_BFLOAT16 ? ds::widen_bfloat16(bits) : ds::widen_float16(bits);
}

// Outputs [begin, end) of a matrix, whose weights are of `kind`.
#define DS_COMPUTE(set)                                                            \
    namespace set {                                                                \
    void compute(const Work &work, int32_t kind, int64_t begin, int64_t end);      \
    }
DS_COMPUTE(plain)
DS_COMPUTE(avx2)
DS_COMPUTE(avx512)
DS_COMPUTE(avx512_dot)  // with VNNI and BF16
#undef DS_COMPUTE

}  // namespace ds::products
