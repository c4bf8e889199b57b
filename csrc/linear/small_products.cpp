// Products of a few rows with a matrix of weights, which are read once and widened on the way: as fast as memory gives them.
//
// Weights are bfloat16, or integers of 8 or 4 bits with a scale for each group of columns of a row. Integers lie in runs:
// 16 words hold as many times 16 columns as a word holds integers, and number n of word i is column 16 n + i, so that a
// shift gives 16 columns that lie side by side.
#include <vector>

#include "lanes.h"

namespace {

using ds::kLanes;
using ds::Lanes;

constexpr int64_t kMostRows = 8;
constexpr int64_t kRowsOfWork = 32;  // of the matrix, that a thread takes at a time

struct Work {
    const ds_product *product;
    const float *inputs;  // [rows, padded]: zeros beyond the columns
    int64_t padded;
};

// sums[n][r] += columns [begin, end) of N rows of the matrix times R rows of the input; whole lanes, or runs of integers.
template <int64_t R, int64_t N, int32_t kind>
DS_INLINE void add_columns(const Work &work, const char *matrix, int64_t begin, int64_t end, Lanes (&sums)[N][R]) {
    constexpr int32_t bits = kind == DS_WEIGHTS_INT8 ? 8 : 4;
    constexpr int64_t step = kind == DS_WEIGHTS_BFLOAT16 ? kLanes : kLanes * 32 / bits;
    const int64_t row_bytes = work.product->row_bytes;
    for (int64_t column = begin; column < end; column += step) {
        for (int64_t part = 0; part < step / kLanes; ++part) {
            Lanes input[R];
            for (int64_t r = 0; r < R; ++r)
                ds::load(input[r], work.inputs + r * work.padded + column + part * kLanes);
            for (int64_t n = 0; n < N; ++n) {
                const char *row = matrix + n * row_bytes;
                Lanes weights;
                if constexpr (kind == DS_WEIGHTS_BFLOAT16)
                    ds::load_bfloat16(weights, reinterpret_cast<const uint16_t *>(row) + column);
                else
                    ds::load_integers<bits>(weights, reinterpret_cast<const int32_t *>(row + column * bits / 8),
                                            int32_t(part));
                for (int64_t r = 0; r < R; ++r) sums[n][r] += weights * input[r];
            }
        }
    }
}

// N rows of the matrix from `output` on.
template <int64_t R, int64_t N, int32_t kind>
DS_INLINE void outputs_of(const Work &work, int64_t output) {
    const ds_product &p = *work.product;
    const char *row = static_cast<const char *>(p.matrix) + output * p.row_bytes;
    float totals[N][R] = {};
    if constexpr (kind == DS_WEIGHTS_BFLOAT16) {
        Lanes sums[N][R] = {};
        const int64_t whole = p.columns / kLanes * kLanes;
        add_columns<R, N, kind>(work, row, 0, whole, sums);
        for (int64_t n = 0; n < N && whole < p.columns; ++n) {
            uint16_t rest[kLanes] = {};
            std::memcpy(rest, reinterpret_cast<const uint16_t *>(row + n * p.row_bytes) + whole,
                        size_t(p.columns - whole) * 2);
            Lanes weights, input;
            ds::load_bfloat16(weights, rest);
            for (int64_t r = 0; r < R; ++r) {
                ds::load(input, work.inputs + r * work.padded + whole);
                sums[n][r] += weights * input;
            }
        }
        for (int64_t n = 0; n < N; ++n)
            for (int64_t r = 0; r < R; ++r) totals[n][r] = ds::sum(sums[n][r]);
    } else {
        const int64_t groups = work.padded / p.group;
        Lanes scaled[N][R] = {};
        for (int64_t g = 0; g < groups; ++g) {
            Lanes sums[N][R] = {};
            add_columns<R, N, kind>(work, row, g * p.group, (g + 1) * p.group, sums);
            for (int64_t n = 0; n < N; ++n)
                for (int64_t r = 0; r < R; ++r) scaled[n][r] += p.scales[(output + n) * groups + g] * sums[n][r];
        }
        for (int64_t n = 0; n < N; ++n)
            for (int64_t r = 0; r < R; ++r) totals[n][r] = ds::sum(scaled[n][r]);
    }
    for (int64_t n = 0; n < N; ++n) {
        const float bias = p.bias != nullptr ? ds::widen_bfloat16(p.bias[output + n]) : 0.0f;
        for (int64_t r = 0; r < R; ++r)
            p.output[r * p.outputs + output + n] = ds::round_bfloat16(totals[n][r] + bias);
    }
}

template <int64_t R, int32_t kind>
DS_INLINE void run_rows(const Work &work, int64_t begin, int64_t end) {
    constexpr int64_t N = R == 1 ? 4 : R <= 3 ? 2 : 1;
    int64_t output = begin;
    for (; output + N <= end; output += N) outputs_of<R, N, kind>(work, output);
    for (; output < end; ++output) outputs_of<R, 1, kind>(work, output);
}

template <int32_t kind>
DS_INLINE void run_kind(const Work &work, int64_t begin, int64_t end) {
    switch (work.product->rows) {
        case 1: return run_rows<1, kind>(work, begin, end);
        case 2: return run_rows<2, kind>(work, begin, end);
        case 3: return run_rows<3, kind>(work, begin, end);
        case 4: return run_rows<4, kind>(work, begin, end);
        case 5: return run_rows<5, kind>(work, begin, end);
        case 6: return run_rows<6, kind>(work, begin, end);
        case 7: return run_rows<7, kind>(work, begin, end);
        default: return run_rows<8, kind>(work, begin, end);
    }
}

DS_INLINE void run_body(const Work &work, int64_t begin, int64_t end) {
    switch (work.product->weights) {
        case DS_WEIGHTS_BFLOAT16: return run_kind<DS_WEIGHTS_BFLOAT16>(work, begin, end);
        case DS_WEIGHTS_INT8: return run_kind<DS_WEIGHTS_INT8>(work, begin, end);
        default: return run_kind<DS_WEIGHTS_INT4>(work, begin, end);
    }
}

DS_KERNEL(run, (const Work &work, int64_t begin, int64_t end), (work, begin, end))

}  // namespace

int32_t ds_small_product(const ds_product *product, int32_t threads) {
    if (product->rows < 1 || product->rows > kMostRows) return 0;
    static thread_local std::vector<float> inputs;
    const int64_t bits = product->weights == DS_WEIGHTS_INT8 ? 8 : 4;
    const int64_t together = product->weights == DS_WEIGHTS_BFLOAT16 ? kLanes : kLanes * 32 / bits;
    const int64_t padded = (product->columns + together - 1) / together * together;
    inputs.assign(size_t(product->rows * padded), 0.0f);
    for (int64_t r = 0; r < product->rows; ++r)
        ds::widen(product->input + r * product->columns, DS_BFLOAT16, inputs.data() + r * padded, product->columns);
    const Work work{product, inputs.data(), padded};
    const int64_t pieces = (product->outputs + kRowsOfWork - 1) / kRowsOfWork;
    const auto piece = [&](int64_t i) {
        const int64_t end = (i + 1) * kRowsOfWork;
        run(work, i * kRowsOfWork, end < product->outputs ? end : product->outputs);
    };
    if (threads <= 1 || product->outputs * product->columns < ds::kParallelNumel) {
        for (int64_t i = 0; i < pieces; ++i) piece(i);
        return 1;
    }
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < pieces; ++i) piece(i);
    return 1;
}
