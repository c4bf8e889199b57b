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
//
// [Note: sums of bytes] The dot product of VNNI for bytes takes four columns of a lane at once, and hence less than half of
// the instructions that widening integers to 16 bits takes; but its first factor has no sign, and
// its second has 8 bits. So the weights are raised to start at 0, the input is cut into its upper 8 and lower 7 bits, and
// what the raise was too much, the same for all rows of the matrix, is where the sums begin. They are exact modulo 2^32, and
// what they are at the end needs no more, so that the bits are those of the other way.
#include <algorithm>
#include <cmath>
#include <vector>

#include "operations.h"
#include "products.h"

namespace {

using namespace ds::products;
using ds::kLanes;

constexpr float kLargestInput = 16383.0f;
constexpr int64_t kOutputsOfWork = 64;
constexpr int64_t kTile = 4;               // outputs that are computed together
constexpr int64_t kFewOutputs = 16;        // of work, of few rows: a multiple of the tiles and of cache lines
constexpr int64_t kBytesOfWork = 16 << 10; // likewise, at least
constexpr int64_t kBytesAhead = 12 << 10;  // between the weights in use and those asked of the memory
constexpr int64_t kFirstBytes = 64 << 10;  // likewise, before the product begins

#if defined(DS_PRODUCT_SETS)
bool has_dots() {
    static const bool dots = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    return dots && ds_isa() == 2;
}

void compute(const Work &work, int32_t kind, int64_t begin, int64_t end) {
    switch (ds_isa()) {
        case 2: return has_dots() ? avx512_dot::compute(work, kind, begin, end) : avx512::compute(work, kind, begin, end);
        case 1: return avx2::compute(work, kind, begin, end);
        default: return plain::compute(work, kind, begin, end);
    }
}
#else
bool has_dots() { return false; }
void compute(const Work &work, int32_t kind, int64_t begin, int64_t end) { plain::compute(work, kind, begin, end); }
#endif

bool of_integers(const ds_product &product) {
    return product.weights == DS_WEIGHTS_INT8 || product.weights == DS_WEIGHTS_INT4;
}

// See [Note: sums of bytes].
bool by_bytes(const ds_product &product) { return of_integers(product) && has_dots(); }

int64_t padded_columns(const ds_product &product) {
    const int64_t run = product.weights == DS_WEIGHTS_INT8 ? 64 : product.weights == DS_WEIGHTS_INT4 ? 128 : 32;
    return (product.columns + run - 1) / run * run;
}

// Of a prepared row's numbers; a multiple of cache lines.
int64_t number_bytes(const ds_product &product) {
    return padded_columns(product) * (product.weights == DS_WEIGHTS_FLOAT32 ? 4 : 2);
}

// Sums of a row that are not longer than they are exact.
int64_t exact_sums(int64_t padded, int64_t group) { return padded / group * ((group + kExactColumns - 1) / kExactColumns); }

// Of a prepared row, with the raise of the matrix with the most groups.
int64_t row_bytes(const ds_product &product) {
    int64_t sums = 0;
    for (int64_t m = 0; m < product.count && by_bytes(product); ++m)
        sums += exact_sums(padded_columns(product), product.matrices[m].group);
    return number_bytes(product) + sums * kLine;
}

DS_INLINE float largest_of(const float *__restrict values, int64_t padded) {
    float lanes[kLanes] = {};
    for (int64_t i = 0; i < padded; i += kLanes)
        DS_IVDEP for (int64_t j = 0; j < kLanes; ++j) {
            const float size = std::fabs(values[i + j]);
            lanes[j] = size > lanes[j] ? size : lanes[j];
        }
    float largest = 0;
    for (int64_t j = 0; j < kLanes; ++j) largest = lanes[j] > largest ? lanes[j] : largest;
    return largest;
}

// To nearest even, by an addition that leaves no digits below the point.
DS_INLINE int32_t to_nearest(float x) { return int32_t(x + 12582912.0f - 12582912.0f); }

// values[0..padded) of a row -> 16-bit integers, in pairs as they lie in the runs of the weights.
template <int32_t bits>
DS_INLINE void to_pairs(const float *__restrict values, int64_t padded, float inverse, int16_t *__restrict target) {
    constexpr int64_t run = kLanes * 32 / bits, parts = 16 / bits;
    for (int64_t start = 0; start < padded; start += run)
        for (int64_t part = 0; part < parts; ++part) {
            const float *low = values + start + part * kLanes, *high = low + parts * kLanes;
            int16_t *pairs = target + start + part * 2 * kLanes;
            DS_IVDEP for (int64_t i = 0; i < kLanes; ++i) {
                pairs[2 * i] = int16_t(to_nearest(low[i] * inverse));
                pairs[2 * i + 1] = int16_t(to_nearest(high[i] * inverse));
            }
        }
}

// The same as bytes: of each line of the weights, the upper and then the lower bits of the columns whose weights lie in
// the bytes of a word (of 4 bits: in the lower, then in the upper halves of its bytes).
template <int32_t bits>
DS_INLINE void to_bytes(const float *__restrict values, int64_t padded, float inverse, char *__restrict target) {
    constexpr int64_t run = kLanes * 32 / bits, parts = 8 / bits;
    for (int64_t start = 0; start < padded; start += run)
        for (int64_t part = 0; part < parts; ++part) {
            uint32_t *high = reinterpret_cast<uint32_t *>(target + start * 2 + part * 2 * kLine), *low = high + kLanes;
            const float *from = values + start + part * kLanes;
            DS_IVDEP for (int64_t i = 0; i < kLanes; ++i) {
                uint32_t upper = 0, lower = 0;
                for (int64_t byte = 0; byte < 4; ++byte) {
                    const int32_t x = to_nearest(from[byte * parts * kLanes + i] * inverse);
                    upper |= uint32_t((x >> 7) & 0xff) << (8 * byte);
                    lower |= uint32_t(x & 0x7f) << (8 * byte);
                }
                high[i] = upper, low[i] = lower;
            }
        }
}

// What raising the weights by half of their range adds to the lanes of each exact sum, less than nothing.
template <int32_t bits>
DS_INLINE void to_raise(const float *__restrict values, int64_t padded, float inverse, int64_t group,
                        uint32_t *__restrict target) {
    for (int64_t begin = 0; begin < padded;) {
        const int64_t of_group = (begin / group + 1) * group;
        const int64_t end = of_group < begin + kExactColumns ? of_group : begin + kExactColumns;
        uint32_t sums[kLanes] = {};
        for (int64_t column = begin; column < end; column += kLanes)
            DS_IVDEP for (int64_t i = 0; i < kLanes; ++i) sums[i] += uint32_t(to_nearest(values[column + i] * inverse));
        for (int64_t i = 0; i < kLanes; ++i) target[i] = 0u - (sums[i] << (bits - 1));
        target += kLanes;
        begin = end;
    }
}

template <int32_t bits>
DS_INLINE void to_integers(const ds_product &product, const float *values, int64_t padded, float inverse, bool bytes,
                           char *target) {
    if (!bytes) return to_pairs<bits>(values, padded, inverse, reinterpret_cast<int16_t *>(target));
    to_bytes<bits>(values, padded, inverse, target);
    target += padded * 2;
    for (int64_t m = 0; m < product.count; ++m) {
        const int64_t group = product.matrices[m].group;
        if (m > 0 && group == product.matrices[m - 1].group) continue;
        to_raise<bits>(values, padded, inverse, group, reinterpret_cast<uint32_t *>(target));
        target += exact_sums(padded, group) * kLine;
    }
}

DS_INLINE void prepare_row_body(const ds_product &product, int64_t row, bool bytes, float *wide, char *target,
                                float *scale) {
    const int64_t padded = padded_columns(product), columns = product.columns;
    const void *source =
        ds::at(static_cast<const char *>(product.input), row * product.input_stride, product.input_dtype);
    const float *values = ds::widen(source, product.input_dtype, wide, columns);
    const bool integers = of_integers(product);
    if (integers && values != wide && padded > columns) {
        std::memcpy(wide, values, size_t(columns) * sizeof(float));
        values = wide;
    }
    if (integers) {
        if (padded > columns) std::memset(wide + columns, 0, size_t(padded - columns) * sizeof(float));
        const float largest = largest_of(values, padded), inverse = largest > 0 ? kLargestInput / largest : 0.0f;
        *scale = largest / kLargestInput;
        if (product.weights == DS_WEIGHTS_INT8)
            to_integers<8>(product, values, padded, inverse, bytes, target);
        else
            to_integers<4>(product, values, padded, inverse, bytes, target);
        return;
    }
    const int32_t dtype = product.weights == DS_WEIGHTS_FLOAT32 ? DS_FLOAT32 : DS_BFLOAT16;
    ds::narrow(target, dtype, values, columns);
    const int64_t item = ds::item_size(dtype);
    std::memset(target + columns * item, 0, size_t((padded - columns) * item));
}

DS_KERNEL(prepare_row,
          (const ds_product &product, int64_t row, bool bytes, float *wide, char *target, float *scale),
          (product, row, bytes, wide, target, scale))

struct Prepared {
    int64_t count, row_size;
    char *rows;
    float *scales;

    Prepared(const ds_product &product, int64_t count, char *memory)
        : count(count),
          row_size(row_bytes(product)),
          rows(reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(memory) + kLine - 1) / kLine * kLine)),
          scales(reinterpret_cast<float *>(rows + count * row_size)) {}

    static int64_t bytes(const ds_product &product, int64_t count) {
        return count * (row_bytes(product) + int64_t(sizeof(float))) + kLine;
    }

    void prepare(const ds_product &product, int64_t row) const {
        static thread_local std::vector<float> wide;
        wide.resize(size_t(padded_columns(product)));
        prepare_row(product, row, by_bytes(product), wide.data(), rows + row * row_size, scales + row);
    }
};

// `seen`: outputs of the matrices before it. `raise_at`: of the inputs' bytes.
Work work_of(const ds_product &product, const ds_matrix &matrix, const Prepared &prepared, int64_t seen,
             int64_t raise_at) {
    Work work;
    work.matrix = static_cast<const char *>(matrix.values);
    work.scales = matrix.scales;
    work.bias = matrix.bias;
    work.inputs = prepared.rows;
    work.input_scales = prepared.scales;
    work.output = static_cast<char *>(product.output) + seen * ds::item_size(product.output_dtype);
    work.row_bytes = matrix.row_bytes;
    work.input_bytes = prepared.row_size;
    work.rows = prepared.count;
    work.columns = product.columns;
    work.group = matrix.group;
    work.groups = of_integers(product) ? padded_columns(product) / matrix.group : 0;
    work.output_stride = product.output_stride;
    const int64_t tile = kTile * matrix.row_bytes;
    work.ahead = (kBytesAhead + tile - 1) / tile * tile;
    work.raise_at = raise_at;
    work.bias_dtype = matrix.bias_dtype;
    work.output_dtype = product.output_dtype;
    return work;
}

// Outputs [begin, end) of all matrices, one behind the other.
void compute_range(const ds_product &product, const Prepared &prepared, int64_t begin, int64_t end) {
    const int64_t padded = padded_columns(product);
    int64_t seen = 0, raise_at = padded * 2;
    for (int64_t m = 0; m < product.count && seen < end; ++m) {
        const ds_matrix &matrix = product.matrices[m];
        const int64_t first = std::max(begin, seen), last = std::min(end, seen + matrix.outputs);
        if (prepared.row_size > number_bytes(product) && m > 0 && matrix.group != product.matrices[m - 1].group)
            raise_at += exact_sums(padded, product.matrices[m - 1].group) * kLine;
        if (first < last)
            compute(work_of(product, matrix, prepared, seen, raise_at), product.weights, first - seen, last - seen);
        seen += matrix.outputs;
    }
}

int64_t outputs_of(const ds_product &product) {
    int64_t outputs = 0;
    for (int64_t m = 0; m < product.count; ++m) outputs += product.matrices[m].outputs;
    return outputs;
}

// How the outputs are divided: `units` of `size` numbers each, of the product's outputs or of those of its gate.
struct Division {
    int64_t outputs, size, units;

    Division(const ds_product &product, int64_t rows, const ds_gate *gate)
        : outputs(gate == nullptr ? outputs_of(product) : gate->size), size(kOutputsOfWork) {
        if (rows <= ds::kOwnRows) {
            const int64_t wanted = kBytesOfWork / std::max<int64_t>(product.matrices[0].row_bytes, 1);
            size = std::clamp(wanted / kFewOutputs * kFewOutputs, kFewOutputs, kOutputsOfWork);
        }
        units = (outputs + size - 1) / size;
    }
};

}  // namespace

int64_t ds::product_shared_bytes(const ds_product &product, int64_t rows) {
    return rows <= kOwnRows ? 0 : Prepared::bytes(product, rows);
}

void ds::product_prepare(const ds_product &product, int64_t rows, const Team &team) {
    if (rows <= kOwnRows) return;
    const Prepared prepared(product, rows, team.shared);
    for_own_rows(team, rows, [&](int64_t row) { prepared.prepare(product, row); });
}

void ds::product_compute(const ds_product &product, int64_t rows, const Team &team, const ds_gate *gate) {
    static thread_local std::vector<char> own;
    char *memory = team.shared;
    if (rows <= kOwnRows) {
        own.resize(size_t(Prepared::bytes(product, rows)));
        memory = own.data();
    }
    const Prepared prepared(product, rows, memory);
    for (int64_t row = 0; row < rows && rows <= kOwnRows; ++row) prepared.prepare(product, row);
    const Division division(product, rows, gate);
    for_shares(team, division.units, [&](int64_t first, int64_t last) {
        const int64_t begin = first * division.size, end = std::min(last * division.size, division.outputs);
        compute_range(product, prepared, begin, end);
        if (gate == nullptr) return;
        if (gate->up != nullptr) compute_range(product, prepared, gate->size + begin, gate->size + end);
        gate_columns(*gate, rows, begin, end);
    });
}

ds::Ahead ds::product_ahead(const ds_product &product, int64_t rows, const Team &team, const ds_gate *gate) {
    const Division division(product, rows, gate);
    int64_t output = team.share_begin(team.thread, division.units) * division.size;
    for (int64_t m = 0; m < product.count; ++m) {
        const ds_matrix &matrix = product.matrices[m];
        if (output < matrix.outputs) {
            const char *values = static_cast<const char *>(matrix.values) + output * matrix.row_bytes;
            return {values, std::min((matrix.outputs - output) * matrix.row_bytes, kFirstBytes)};
        }
        output -= matrix.outputs;
    }
    return {};
}

bool ds::product_gated(const ds_product &product, const ds_gate &gate) {
    const char *up = ds::at(static_cast<const char *>(product.output), gate.size, gate.dtype);
    return gate.gate == product.output && (gate.up == nullptr || gate.up == up) && gate.dtype == product.output_dtype &&
           gate.input_stride == product.output_stride && outputs_of(product) == gate.size * (gate.up == nullptr ? 1 : 2);
}
