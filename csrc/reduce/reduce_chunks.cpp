// Conversions with a scale, and the sum of equal chunks that received gradients are reduced with.
#include "kernel.h"

namespace {

DS_INLINE void scale_block(const float *source, float *target, float scale, int64_t n) {
    // The two may be the same memory, never overlapping in part.
    DS_IVDEP for (int64_t i = 0; i < n; ++i) target[i] = source[i] * scale;
}

// A result block of fp32 is formed where it belongs, a 16-bit one in the buffer.
DS_INLINE float *result_block(void *target, int32_t dtype, float *buffer) {
    return dtype == DS_FLOAT32 ? static_cast<float *>(target) : buffer;
}

DS_INLINE void copy_run_body(const ds_copy &copy, float scale, int64_t begin, int64_t end) {
    alignas(64) float read[ds::kBlock], write[ds::kBlock];
    for (int64_t i = begin; i < end; i += ds::kBlock) {
        const int64_t n = end - i < ds::kBlock ? end - i : ds::kBlock;
        const float *source = ds::widen(ds::at(copy.input, i, copy.input_dtype), copy.input_dtype, read, n);
        void *target = ds::at(copy.output, i, copy.output_dtype);
        float *result = result_block(target, copy.output_dtype, write);
        scale_block(source, result, scale, n);
        ds::narrow(target, copy.output_dtype, result, n);
    }
}

DS_INLINE void reduce_run_body(void *output, int32_t output_dtype, const void *const *inputs, int64_t count,
                               int32_t input_dtype, float scale, int64_t begin, int64_t end) {
    alignas(64) float sum[ds::kBlock], read[ds::kBlock];
    for (int64_t i = begin; i < end; i += ds::kBlock) {
        const int64_t n = end - i < ds::kBlock ? end - i : ds::kBlock;
        const float *first = ds::widen(ds::at(inputs[0], i, input_dtype), input_dtype, read, n);
        std::memcpy(sum, first, size_t(n) * sizeof(float));
        for (int64_t k = 1; k < count; ++k) {
            const float *__restrict next = ds::widen(ds::at(inputs[k], i, input_dtype), input_dtype, read, n);
            DS_IVDEP for (int64_t j = 0; j < n; ++j) sum[j] += next[j];
        }
        void *target = ds::at(output, i, output_dtype);
        float *result = result_block(target, output_dtype, sum);
        scale_block(sum, result, scale, n);
        ds::narrow(target, output_dtype, result, n);
    }
}

DS_KERNEL(copy_run, (const ds_copy &copy, float scale, int64_t begin, int64_t end), (copy, scale, begin, end))
DS_KERNEL(reduce_run,
          (void *output, int32_t output_dtype, const void *const *inputs, int64_t count, int32_t input_dtype,
           float scale, int64_t begin, int64_t end),
          (output, output_dtype, inputs, count, input_dtype, scale, begin, end))

}  // namespace

void ds_scale_copy(const ds_copy *copies, int64_t count, double scale, int32_t threads) {
    ds::for_each_run(
        count, threads, [&](int64_t i) { return copies[i].numel; },
        [&](int64_t i, int64_t begin, int64_t end) { copy_run(copies[i], float(scale), begin, end); });
}

void ds_reduce_chunks(void *output, int32_t output_dtype, const void *const *inputs, int64_t count,
                      int32_t input_dtype, int64_t numel, double scale, int32_t threads) {
    ds::for_each_run(
        1, threads, [&](int64_t) { return numel; },
        [&](int64_t, int64_t begin, int64_t end) {
            reduce_run(output, output_dtype, inputs, count, input_dtype, float(scale), begin, end);
        });
}
