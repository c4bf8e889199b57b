// Products of a few rows with matrices of weights, which are read as they lie, at the speed of the memory.
//
// Weights are fp32, bfloat16, or integers of 8 or 4 bits with a scale for each group of columns of a row. The inputs are
// prepared once: rounded to bfloat16 for weights of bfloat16; for integers rounded to 15 bits, each row with a scale, and
// laid so that a shift of the weights gives pairs of columns that are pairs of the input. (Rounded so, an input differs by
// 2^-15 of the row's largest: of the same order as bfloat16's error of that largest one, and far below the error of the
// weights.)
//
// Long integer sums are cut where they could overflow: a lane's sum of kExactColumns / 16 products of 14 and 7 bits and
// signs is below 2^31.
#include <algorithm>
#include <cmath>
#include <vector>

#include "lanes.h"
#include "operations.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace {

using ds::kLanes;
using ds::Lanes;

constexpr int64_t kExactColumns = 16384;
constexpr float kLargestInput = 16383.0f;
constexpr int64_t kOwnRows = 2;      // up to so many, every thread prepares the inputs for itself
constexpr int64_t kOutputsOfWork = 64;
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
    int32_t bias_dtype, output_dtype;
};

DS_INLINE float number_at(const void *base, int32_t dtype, int64_t index) {
    if (dtype == DS_FLOAT32) return static_cast<const float *>(base)[index];
    const uint16_t bits = static_cast<const uint16_t *>(base)[index];
    return dtype == DS_BFLOAT16 ? ds::widen_bfloat16(bits) : ds::widen_float16(bits);
}

#if defined(__x86_64__) && defined(__GNUC__)
namespace plain {
#define DS_DOT 1
#include "tiles.h"
#undef DS_DOT
}  // namespace plain
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("arch=x86-64-v3"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#endif
namespace avx2 {
#define DS_DOT 2
#include "tiles.h"
#undef DS_DOT
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("arch=x86-64-v4"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")
#endif
namespace avx512 {
#define DS_DOT 3
#include "tiles.h"
#undef DS_DOT
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("arch=x86-64-v4,avx512vnni,avx512bf16"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,avx512vnni,avx512bf16,prefer-vector-width=512")
#endif
namespace avx512_dot {
#define DS_DOT 4
#include "tiles.h"
#undef DS_DOT
}  // namespace avx512_dot
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

void compute(const Work &work, int32_t kind, int64_t begin, int64_t end) {
    static const bool dots = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    switch (ds_isa()) {
        case 2: return dots ? avx512_dot::compute(work, kind, begin, end) : avx512::compute(work, kind, begin, end);
        case 1: return avx2::compute(work, kind, begin, end);
        default: return plain::compute(work, kind, begin, end);
    }
}
#else
#define DS_DOT 0
#include "tiles.h"
#undef DS_DOT
#endif

int64_t padded_columns(const ds_product &product) {
    const int64_t run = product.weights == DS_WEIGHTS_INT8 ? 64 : product.weights == DS_WEIGHTS_INT4 ? 128 : 32;
    return (product.columns + run - 1) / run * run;
}

// Of a prepared row; a multiple of cache lines.
int64_t row_bytes(const ds_product &product) {
    return padded_columns(product) * (product.weights == DS_WEIGHTS_FLOAT32 ? 4 : 2);
}

// values[0..padded) of a row -> 16-bit integers, in pairs as they lie in the runs of the weights. Returns their scale.
template <int32_t bits>
DS_INLINE float to_integers(const float *__restrict values, int64_t padded, int16_t *__restrict target) {
    constexpr int64_t run = kLanes * 32 / bits, parts = 16 / bits;
    float lanes[kLanes] = {};
    for (int64_t i = 0; i < padded; i += kLanes)
        DS_IVDEP for (int64_t j = 0; j < kLanes; ++j) {
            const float size = std::fabs(values[i + j]);
            lanes[j] = size > lanes[j] ? size : lanes[j];
        }
    float largest = 0;
    for (int64_t j = 0; j < kLanes; ++j) largest = lanes[j] > largest ? lanes[j] : largest;
    const float inverse = largest > 0 ? kLargestInput / largest : 0.0f;
    for (int64_t start = 0; start < padded; start += run)
        for (int64_t part = 0; part < parts; ++part) {
            const float *low = values + start + part * kLanes, *high = low + parts * kLanes;
            int16_t *pairs = target + start + part * 2 * kLanes;
            DS_IVDEP for (int64_t i = 0; i < kLanes; ++i) {
                // to nearest even, by an addition that leaves no digits below the point
                pairs[2 * i] = int16_t(int32_t(low[i] * inverse + 12582912.0f - 12582912.0f));
                pairs[2 * i + 1] = int16_t(int32_t(high[i] * inverse + 12582912.0f - 12582912.0f));
            }
        }
    return largest / kLargestInput;
}

DS_INLINE void prepare_row_body(const ds_product &product, int64_t row, float *wide, char *target, float *scale) {
    const int64_t padded = padded_columns(product), columns = product.columns;
    const void *source =
        ds::at(static_cast<const char *>(product.input), row * product.input_stride, product.input_dtype);
    const float *values = ds::widen(source, product.input_dtype, wide, columns);
    const bool integers = product.weights == DS_WEIGHTS_INT8 || product.weights == DS_WEIGHTS_INT4;
    if (integers && values != wide && padded > columns) {
        std::memcpy(wide, values, size_t(columns) * sizeof(float));
        values = wide;
    }
    if (integers) {
        if (padded > columns) std::memset(wide + columns, 0, size_t(padded - columns) * sizeof(float));
        int16_t *pairs = reinterpret_cast<int16_t *>(target);
        *scale = product.weights == DS_WEIGHTS_INT8 ? to_integers<8>(values, padded, pairs)
                                                    : to_integers<4>(values, padded, pairs);
        return;
    }
    const int32_t dtype = product.weights == DS_WEIGHTS_FLOAT32 ? DS_FLOAT32 : DS_BFLOAT16;
    ds::narrow(target, dtype, values, columns);
    const int64_t item = ds::item_size(dtype);
    std::memset(target + columns * item, 0, size_t((padded - columns) * item));
}

DS_KERNEL(prepare_row, (const ds_product &product, int64_t row, float *wide, char *target, float *scale),
          (product, row, wide, target, scale))

struct Prepared {
    char *rows;
    float *scales;

    Prepared(const ds_product &product, int64_t count, char *memory)
        : rows(reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(memory) + kLine - 1) / kLine * kLine)),
          scales(reinterpret_cast<float *>(rows + count * row_bytes(product))) {}

    static int64_t bytes(const ds_product &product, int64_t count) {
        return count * (row_bytes(product) + int64_t(sizeof(float))) + kLine;
    }

    void prepare(const ds_product &product, int64_t row) const {
        static thread_local std::vector<float> wide;
        wide.resize(size_t(padded_columns(product)));
        prepare_row(product, row, wide.data(), rows + row * row_bytes(product), scales + row);
    }
};

// `seen`: outputs of the matrices before it.
Work work_of(const ds_product &product, const ds_matrix &matrix, const char *inputs, const float *input_scales,
             int64_t rows, int64_t seen) {
    const bool integers = product.weights == DS_WEIGHTS_INT8 || product.weights == DS_WEIGHTS_INT4;
    Work work;
    work.matrix = static_cast<const char *>(matrix.values);
    work.scales = matrix.scales;
    work.bias = matrix.bias;
    work.inputs = inputs;
    work.input_scales = input_scales;
    work.output = static_cast<char *>(product.output) + seen * ds::item_size(product.output_dtype);
    work.row_bytes = matrix.row_bytes;
    work.input_bytes = row_bytes(product);
    work.rows = rows;
    work.columns = product.columns;
    work.group = matrix.group;
    work.groups = integers ? padded_columns(product) / matrix.group : 0;
    work.output_stride = product.output_stride;
    work.bias_dtype = matrix.bias_dtype;
    work.output_dtype = product.output_dtype;
    return work;
}

}  // namespace

int64_t ds::product_shared_bytes(const ds_product &product, int64_t rows) {
    return rows <= kOwnRows ? 0 : Prepared::bytes(product, rows);
}

void ds::product_prepare(const ds_product &product, int64_t rows, const Team &team) {
    if (rows <= kOwnRows) return;
    const Prepared prepared(product, rows, team.shared);
    for_own_rows(team, rows, [&](int64_t row) { prepared.prepare(product, row); });
}

void ds::product_compute(const ds_product &product, int64_t rows, const Team &team) {
    static thread_local std::vector<char> own;
    char *memory = team.shared;
    if (rows <= kOwnRows) {
        own.resize(size_t(Prepared::bytes(product, rows)));
        memory = own.data();
    }
    const Prepared prepared(product, rows, memory);
    for (int64_t row = 0; row < rows && rows <= kOwnRows; ++row) prepared.prepare(product, row);

    // A thread that has no processor for a while leaves its work to the others.
    int64_t seen = 0, units = 0, mine = team.next->fetch_add(1);
    for (int64_t m = 0; m < product.count; ++m) {
        const ds_matrix &matrix = product.matrices[m];
        const Work work = work_of(product, matrix, prepared.rows, prepared.scales, rows, seen);
        const int64_t first = units;
        units += (matrix.outputs + kOutputsOfWork - 1) / kOutputsOfWork;
        for (; mine < units; mine = team.next->fetch_add(1)) {
            const int64_t begin = (mine - first) * kOutputsOfWork;
            compute(work, product.weights, begin, std::min(begin + kOutputsOfWork, matrix.outputs));
        }
        seen += matrix.outputs;
    }
}
