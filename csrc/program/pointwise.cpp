// What a decoder does between its products: embeddings, norms, rotations with the store to the cache, gated activations.
//
// Numbers are widened to fp32 and rounded once. Sums are kept in 16 lanes (lanes.h): the same bits on every set.
#include <cmath>
#include <vector>

#include "lanes.h"
#include "operations.h"

namespace {

using ds::exponential;
using ds::kLanes;

DS_INLINE float *scratch(int64_t count, int which) {
    static thread_local std::vector<float> memory[4];
    if (int64_t(memory[which].size()) < count) memory[which].resize(size_t(count));
    return memory[which].data();
}

DS_INLINE float sum_of(const float *__restrict x, int64_t n, float mean, bool squares) {
    float lane[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        DS_IVDEP for (int64_t j = 0; j < kLanes; ++j) {
            const float value = x[i + j] - mean;
            lane[j] += squares ? value * value : value;
        }
    }
    for (int64_t j = 0; i + j < n; ++j) {
        const float value = x[i + j] - mean;
        lane[j] += squares ? value * value : value;
    }
    for (int64_t width = kLanes / 2; width > 0; width /= 2)
        for (int64_t j = 0; j < width; ++j) lane[j] += lane[j + width];
    return lane[0];
}

// `sum` may be `x`.
DS_INLINE void add_body(float *sum, const float *x, const float *y, int64_t n) {
    DS_IVDEP for (int64_t i = 0; i < n; ++i) sum[i] = x[i] + y[i];
}

// y = (x - mean) / deviation * (weight + offset) + bias; weight and bias may be null.
DS_INLINE void normalise(const float *__restrict x, float *__restrict y, const float *__restrict weight,
                         const float *__restrict bias, int64_t n, float eps, float offset, bool centered) {
    const float mean = centered ? sum_of(x, n, 0.0f, false) / float(n) : 0.0f;
    const float scale = 1.0f / std::sqrt(sum_of(x, n, mean, true) / float(n) + eps);
    if (weight == nullptr) {
        DS_IVDEP for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * scale;
    } else {
        DS_IVDEP for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - mean) * scale * (weight[i] + offset);
    }
    if (bias != nullptr) {
        DS_IVDEP for (int64_t i = 0; i < n; ++i) y[i] += bias[i];
    }
}

DS_INLINE const float *optional(const void *source, int32_t dtype, int64_t n, int which) {
    return source == nullptr ? nullptr : ds::widen(source, dtype, scratch(n, which), n);
}

DS_INLINE void norm_row_body(const ds_norm &norm, int64_t from, int64_t to) {
    const int64_t size = norm.size;
    const void *stream = ds::at(static_cast<const char *>(norm.stream), from * size, norm.dtype);
    float *values = scratch(size, 0);
    const float *wide = ds::widen(stream, norm.dtype, values, size);
    if (norm.delta != nullptr) {
        const void *delta = ds::at(static_cast<const char *>(norm.delta), from * size, norm.dtype);
        void *target = ds::at(static_cast<char *>(norm.sum), from * size, norm.dtype);
        float *sum = norm.dtype == DS_FLOAT32 ? static_cast<float *>(target) : values;
        add_body(sum, wide, ds::widen(delta, norm.dtype, scratch(size, 1), size), size);
        ds::narrow(target, norm.dtype, sum, size);
        wide = ds::widen(target, norm.dtype, values, size); // as it was rounded
    }
    const float *weight = optional(norm.weight, norm.weight_dtype, size, 2);
    const float *bias = optional(norm.bias, norm.weight_dtype, size, 3);
    void *output = ds::at(static_cast<char *>(norm.output), to * size, norm.dtype);
    float *result = norm.dtype == DS_FLOAT32 ? static_cast<float *>(output) : scratch(size, 1);
    normalise(wide, result, weight, bias, size, norm.eps, norm.offset, norm.centered != 0);
    ds::narrow(output, norm.dtype, result, size);
}
DS_KERNEL(norm_row, (const ds_norm &norm, int64_t from, int64_t to), (norm, from, to))

DS_INLINE void rotate(float *__restrict x, const float *__restrict cosines, const float *__restrict sines, int64_t half,
                      bool interleaved) {
    if (interleaved) {
        for (int64_t i = 0; i < half; ++i) {
            const float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * cosines[i] - b * sines[i];
            x[2 * i + 1] = b * cosines[i] + a * sines[i];
        }
        return;
    }
    DS_IVDEP for (int64_t i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cosines[i] - b * sines[i];
        x[i + half] = b * cosines[i] + a * sines[i];
    }
}

// The number of the block and the place in it of a token of the step.
struct Slot {
    int64_t block, offset;
};

DS_INLINE Slot slot_of(const ds_step &step, int64_t row, int64_t block_size) {
    for (int64_t p = step.rows == step.piece_count ? row : 0; p < step.piece_count; ++p) {
        const ds_paged_piece &piece = step.pieces[p];
        if (row < piece.row || row >= piece.row + piece.count) continue;
        const int64_t position = piece.start + row - piece.row;
        return {piece.blocks[position / block_size], position % block_size};
    }
    return {-1, 0};
}

template <class T>
DS_INLINE void put_apart(T *to, const T *from, int64_t n, int64_t stride) {
    for (int64_t i = 0; i < n; ++i) to[i * stride] = from[i];
}

// `heads` heads of `size` numbers each, from number `begin` of the rotation's rows on: normalised, where there is a weight,
// and rotated. Returns them in fp32.
DS_INLINE const float *turn_heads(const ds_rotary &r, int64_t begin, int64_t heads, const void *given, int64_t angles,
                                  int which) {
    const int64_t size = r.key_size, half = r.rotary / 2;
    void *source = ds::at(static_cast<char *>(r.projected), begin, r.dtype);
    float *values = r.dtype == DS_FLOAT32 ? static_cast<float *>(source) : scratch(heads * size, which);
    ds::widen(source, r.dtype, values, heads * size);
    const float *weight = optional(given, r.weight_dtype, size, 2);
    for (int64_t h = 0; h < heads; ++h) {
        float *head = values + h * size;
        if (weight != nullptr) {
            float *normed = scratch(size, 3);
            normalise(head, normed, weight, nullptr, size, r.eps, 0.0f, false);
            std::memcpy(head, normed, size_t(size) * sizeof(float));
        }
        rotate(head, r.cosines + angles, r.sines + angles, half, r.interleaved != 0);
    }
    ds::narrow(source, r.dtype, values, heads * size);
    return values;
}

// Of one row, a head of keys with the queries that share it.
DS_INLINE void rotary_head_body(const ds_rotary &r, const ds_step &step, int64_t row, int64_t head) {
    const int64_t total = r.heads * r.key_size + r.kv_heads * (r.key_size + r.value_size);
    const int64_t group = r.heads / r.kv_heads, first = row * total, angles = step.positions[row] * (r.rotary / 2);
    const int64_t of_keys = first + r.heads * r.key_size, of_values = of_keys + r.kv_heads * r.key_size;
    turn_heads(r, first + head * group * r.key_size, group, r.query_weight, angles, 0);
    const float *key = turn_heads(r, of_keys + head * r.key_size, 1, r.key_weight, angles, 1);
    const Slot slot = slot_of(step, row, r.block_size);
    if (r.keys == nullptr || slot.block < 0) return;
    const int64_t begin = (slot.block * r.kv_heads + head) * r.block_size;
    void *column = ds::at(static_cast<char *>(r.keys), begin * r.key_size + slot.offset, r.cache_dtype);
    float *stored = scratch(r.key_size, 3);
    ds::narrow(stored, r.cache_dtype, key, r.key_size);
    if (r.cache_dtype == DS_FLOAT32)
        put_apart(static_cast<float *>(column), stored, r.key_size, r.block_size);
    else
        put_apart(static_cast<uint16_t *>(column), reinterpret_cast<uint16_t *>(stored), r.key_size, r.block_size);
    const void *source = ds::at(static_cast<const char *>(r.projected), of_values + head * r.value_size, r.dtype);
    const float *value = ds::widen(source, r.dtype, scratch(r.value_size, 0), r.value_size);
    ds::narrow(ds::at(static_cast<char *>(r.values), (begin + slot.offset) * r.value_size, r.cache_dtype),
               r.cache_dtype, value, r.value_size);
}
DS_KERNEL(rotary_head, (const ds_rotary &r, const ds_step &step, int64_t row, int64_t head), (r, step, row, head))

// exp(-|x|) / (1 + exp(-|x|)) for negative x, 1 / (1 + exp(-|x|)) for others
DS_INLINE float sigmoid(float x) {
    const float power = exponential(-std::fabs(x));
    return ds::choose(x < 0, power, 1.0f) / (1.0f + power);
}

// Abramowitz and Stegun, 7.1.26: within 1.5e-7
DS_INLINE float error_function(float x) {
    const float size = std::fabs(x), t = 1.0f / (1.0f + 0.3275911f * size);
    const float sum =
        ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
    const float value = 1.0f - sum * exponential(-size * size);
    return std::copysign(value, x);
}

template <int32_t activation>
DS_INLINE float activated(float x) {
    if constexpr (activation == DS_SILU) return x * sigmoid(x);
    if constexpr (activation == DS_GELU) return 0.5f * x * (1.0f + error_function(x * 0.70710678f));
    // (1 + tanh(u)) / 2 is the sigmoid of 2 u
    if constexpr (activation == DS_GELU_TANH) return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
    return ds::choose(x < 0, 0.0f, x);
}

template <int32_t activation>
DS_INLINE void gate_values(const float *__restrict gate, const float *up, float *output, int64_t n) {
    if (up == nullptr) {
        DS_IVDEP for (int64_t i = 0; i < n; ++i) output[i] = activated<activation>(gate[i]);
    } else {
        DS_IVDEP for (int64_t i = 0; i < n; ++i) output[i] = activated<activation>(gate[i]) * up[i];
    }
}

DS_INLINE void gate_row_body(const ds_gate &g, int64_t row) {
    const auto source = [&](const void *base, int which) {
        const void *from = ds::at(static_cast<const char *>(base), row * g.input_stride, g.dtype);
        return ds::widen(from, g.dtype, scratch(g.size, which), g.size);
    };
    const float *gate = source(g.gate, 0), *up = g.up == nullptr ? nullptr : source(g.up, 1);
    void *target = ds::at(static_cast<char *>(g.output), row * g.output_stride, g.dtype);
    float *output = g.dtype == DS_FLOAT32 ? static_cast<float *>(target) : scratch(g.size, 2);
    switch (g.activation) {
        case DS_SILU: gate_values<DS_SILU>(gate, up, output, g.size); break;
        case DS_GELU: gate_values<DS_GELU>(gate, up, output, g.size); break;
        case DS_GELU_TANH: gate_values<DS_GELU_TANH>(gate, up, output, g.size); break;
        default: gate_values<DS_RELU>(gate, up, output, g.size); break;
    }
    ds::narrow(target, g.dtype, output, g.size);
}
DS_KERNEL(gate_row, (const ds_gate &g, int64_t row), (g, row))

DS_INLINE void embedding_row_body(const ds_embedding &e, int64_t token, int64_t row) {
    float *output = static_cast<float *>(e.output) + row * e.size;
    const float *values =
        ds::widen(ds::at(static_cast<const char *>(e.table), token * e.size, e.table_dtype), e.table_dtype, output, e.size);
    ds::narrow(output, DS_FLOAT32, values, e.size);
}
DS_KERNEL(embedding_row, (const ds_embedding &e, int64_t token, int64_t row), (e, token, row))

DS_INLINE void largest_row_body(const ds_largest &l, int64_t row) {
    constexpr int64_t kPart = 1024;
    float buffer[kPart], best = -INFINITY;
    int64_t place = 0;
    for (int64_t start = 0; start < l.size; start += kPart) {
        const int64_t n = l.size - start < kPart ? l.size - start : kPart;
        const void *from = ds::at(static_cast<const char *>(l.input), row * l.input_stride + start, l.dtype);
        const float *values = ds::widen(from, l.dtype, buffer, n);
        float lane[kLanes];
        for (int64_t j = 0; j < kLanes; ++j) lane[j] = best;
        int64_t i = 0;
        for (; i + kLanes <= n; i += kLanes)
            DS_IVDEP for (int64_t j = 0; j < kLanes; ++j) lane[j] = values[i + j] > lane[j] ? values[i + j] : lane[j];
        for (int64_t j = 0; i + j < n; ++j) lane[j] = values[i + j] > lane[j] ? values[i + j] : lane[j];
        float here = best;
        for (int64_t j = 0; j < kLanes; ++j) here = lane[j] > here ? lane[j] : here;
        if (!(here > best)) continue;
        best = here;
        for (int64_t j = 0; j < n; ++j)
            if (values[j] == best) {
                place = start + j;
                break;
            }
    }
    static_cast<int64_t *>(l.output)[row] = place;
}
DS_KERNEL(largest_row, (const ds_largest &l, int64_t row), (l, row))

}  // namespace

void ds::largest(const ds_largest &largest, int64_t rows, const Team &team) {
    for_own_rows(team, rows, [&](int64_t row) { largest_row(largest, row); });
}

void ds::embedding(const ds_embedding &embedding, const int64_t *tokens, int64_t rows, const Team &team) {
    for_own_rows(team, rows, [&](int64_t row) { embedding_row(embedding, tokens[row], row); });
}

void ds::norm(const ds_norm &norm, const int64_t *chosen, int64_t rows, const Team &team) {
    for_own_rows(team, rows, [&](int64_t row) { norm_row(norm, chosen == nullptr ? row : chosen[row], row); });
}

void ds::rotary(const ds_rotary &rotary, const ds_step &step, const Team &team) {
    for_own_share(team, step.rows * rotary.kv_heads, [&](int64_t number) {
        rotary_head(rotary, step, number / rotary.kv_heads, number % rotary.kv_heads);
    });
}

void ds::gate(const ds_gate &gate, int64_t rows, const Team &team) {
    for_own_rows(team, rows, [&](int64_t row) { gate_row(gate, row); });
}

void ds::gate_columns(const ds_gate &gate, int64_t rows, int64_t begin, int64_t end) {
    ds_gate part = gate;
    part.gate = ds::at(static_cast<const char *>(gate.gate), begin, gate.dtype);
    if (gate.up != nullptr) part.up = ds::at(static_cast<const char *>(gate.up), begin, gate.dtype);
    part.output = ds::at(static_cast<char *>(gate.output), begin, gate.dtype);
    part.size = end - begin;
    for (int64_t row = 0; row < rows; ++row) gate_row(part, row);
}
