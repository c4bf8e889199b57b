#include "combine.h"

#include "kernel.h"
#include "shared_memory.h"

namespace {

// ---- few summands, by far the most frequent case, in one pass; more go through ds_reduce_chunks ----------------------

constexpr int32_t kFew = 4;

struct Float32 {
    using Memory = float;
    DS_INLINE float load(float x) { return x; }
    DS_INLINE float store(float x) { return x; }
};
struct BFloat16 {
    using Memory = uint16_t;
    DS_INLINE float load(uint16_t x) { return ds::widen_bfloat16(x); }
    DS_INLINE uint16_t store(float x) { return ds::round_bfloat16(x); }
};
struct Float16 {
    using Memory = uint16_t;
    DS_INLINE float load(uint16_t x) { return ds::widen_float16(x); }
    DS_INLINE uint16_t store(float x) { return ds::round_float16(x); }
};

template <class Out, class In, int32_t Count>
DS_INLINE void add_few(void *output, const void *const *inputs, int64_t numel, float scale) {
    auto *out = static_cast<typename Out::Memory *>(output);
    const typename In::Memory *in[Count];
    for (int32_t k = 0; k < Count; ++k) in[k] = static_cast<const typename In::Memory *>(inputs[k]);
    // The output may be one of the inputs, never overlapping in part.
    DS_IVDEP for (int64_t i = 0; i < numel; ++i) {
        float sum = In::load(in[0][i]);
        for (int32_t k = 1; k < Count; ++k) sum += In::load(in[k][i]);
        out[i] = Out::store(sum * scale);
    }
}

template <class Out, class In>
DS_INLINE void add_counted(void *output, const void *const *inputs, int32_t count, int64_t numel, float scale) {
    switch (count) {
        case 2: return add_few<Out, In, 2>(output, inputs, numel, scale);
        case 3: return add_few<Out, In, 3>(output, inputs, numel, scale);
        default: return add_few<Out, In, kFew>(output, inputs, numel, scale);
    }
}

DS_INLINE void add_few_of_body(void *output, int32_t output_dtype, const void *const *inputs, int32_t count,
                               int32_t input_dtype, int64_t numel, float scale) {
    const bool widens = output_dtype == DS_FLOAT32;
    if (input_dtype == DS_FLOAT32) return add_counted<Float32, Float32>(output, inputs, count, numel, scale);
    if (input_dtype == DS_BFLOAT16) {
        if (widens) return add_counted<Float32, BFloat16>(output, inputs, count, numel, scale);
        return add_counted<BFloat16, BFloat16>(output, inputs, count, numel, scale);
    }
    if (widens) return add_counted<Float32, Float16>(output, inputs, count, numel, scale);
    return add_counted<Float16, Float16>(output, inputs, count, numel, scale);
}

DS_KERNEL(add_few_of,
          (void *output, int32_t output_dtype, const void *const *inputs, int32_t count, int32_t input_dtype,
           int64_t numel, float scale),
          (output, output_dtype, inputs, count, input_dtype, numel, scale))

// ---- dtypes that are combined as they are ----------------------------------------------------------------------------

struct Sum {
    template <class T>
    static T of(T a, T b) {
        if constexpr (std::is_integral_v<T>) {  // wraps around, as torch's integers do
            using Unsigned = std::make_unsigned_t<T>;
            return T(Unsigned(a) + Unsigned(b));
        } else {
            return a + b;
        }
    }
};

struct Max {
    template <class T>
    static T of(T a, T b) {
        return b > a || b != b ? b : a;
    }
};

template <class Op, class T>
void combine(void *output, const void *const *inputs, int32_t count, int64_t numel, T scale) {
    T *out = static_cast<T *>(output);
    for (int64_t i = 0; i < numel; ++i) {
        T value = static_cast<const T *>(inputs[0])[i];
        for (int32_t k = 1; k < count; ++k) value = Op::of(value, static_cast<const T *>(inputs[k])[i]);
        out[i] = value * scale;
    }
}

template <class Op>
void combine_as_is(void *output, const void *const *inputs, int32_t count, int32_t dtype, int64_t numel, double scale) {
    switch (dtype) {
        case DS_FLOAT64: return combine<Op, double>(output, inputs, count, numel, scale);
        case DS_INT8: return combine<Op, int8_t>(output, inputs, count, numel, 1);
        case DS_UINT8: return combine<Op, uint8_t>(output, inputs, count, numel, 1);
        case DS_INT16: return combine<Op, int16_t>(output, inputs, count, numel, 1);
        case DS_INT32: return combine<Op, int32_t>(output, inputs, count, numel, 1);
        default: return combine<Op, int64_t>(output, inputs, count, numel, 1);
    }
}

template <class Format>
void max_of(void *output, const void *const *inputs, int32_t count, int64_t numel) {
    using Memory = typename Format::Memory;
    Memory *out = static_cast<Memory *>(output);
    for (int64_t i = 0; i < numel; ++i) {
        float value = Format::load(static_cast<const Memory *>(inputs[0])[i]);
        for (int32_t k = 1; k < count; ++k)
            value = Max::of(value, Format::load(static_cast<const Memory *>(inputs[k])[i]));
        out[i] = Format::store(value);
    }
}

}  // namespace

namespace ds::shm {

int64_t item_bytes(int32_t dtype) {
    switch (dtype) {
        case DS_FLOAT64:
        case DS_INT64: return 8;
        case DS_FLOAT32:
        case DS_INT32: return 4;
        case DS_BFLOAT16:
        case DS_FLOAT16:
        case DS_INT16: return 2;
        default: return 1;
    }
}

void sum_chunks(void *output, int32_t output_dtype, const void *const *inputs, int32_t count, int32_t input_dtype,
                int64_t numel, double scale) {
    if (input_dtype > DS_FLOAT16) return combine_as_is<Sum>(output, inputs, count, input_dtype, numel, scale);
    const bool few = 2 <= count && count <= kFew && (output_dtype == input_dtype || output_dtype == DS_FLOAT32);
    if (few) return add_few_of(output, output_dtype, inputs, count, input_dtype, numel, float(scale));
    ds_reduce_chunks(output, output_dtype, inputs, count, input_dtype, numel, scale, 1);
}

void max_chunks(void *output, const void *const *inputs, int32_t count, int32_t dtype, int64_t numel) {
    switch (dtype) {
        case DS_FLOAT32: return max_of<Float32>(output, inputs, count, numel);
        case DS_BFLOAT16: return max_of<BFloat16>(output, inputs, count, numel);
        case DS_FLOAT16: return max_of<Float16>(output, inputs, count, numel);
        default: return combine_as_is<Max>(output, inputs, count, dtype, numel, 1);
    }
}

}  // namespace ds::shm
