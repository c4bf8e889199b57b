// Dropout, and the sum with a residual, in one pass: what is dropped is a hash of the element's index and a seed, so nothing
// has to be kept for backward, which drops the same elements of the gradient.
#include "kernel.h"
#include "mixing.h"

namespace {

DS_INLINE void dropout_run_body(const ds_dropout_call &call, int64_t begin, int64_t end) {
    alignas(64) float buffer[2][ds::kBlock], result[ds::kBlock];
    const uint32_t limit = call.limit;
    const float scale = call.scale;
    for (int64_t i = begin; i < end; i += ds::kBlock) {
        const int64_t n = end - i < ds::kBlock ? end - i : ds::kBlock;
        const float *__restrict from = ds::widen(ds::at(call.input, i, call.dtype), call.dtype, buffer[0], n);
        // A block of indices has one seed; its own part of the hash is 32 bits.
        const uint32_t key = ds::mix(uint32_t(call.seed) + ds::mix(uint32_t(call.seed >> 32) + uint32_t(i >> 32)));
        const uint32_t first = uint32_t(i);
        DS_IVDEP for (int64_t j = 0; j < n; ++j) {
            const uint32_t random = ds::mix((first + uint32_t(j)) ^ key);
            result[j] = random < limit ? 0.0f : from[j] * scale;
        }
        if (call.residual != nullptr) {
            const float *__restrict rest = ds::widen(ds::at(call.residual, i, call.dtype), call.dtype, buffer[1], n);
            DS_IVDEP for (int64_t j = 0; j < n; ++j) result[j] = result[j] + rest[j];
        }
        ds::narrow(ds::at(call.output, i, call.dtype), call.dtype, result, n);
    }
}

DS_KERNEL(dropout_run, (const ds_dropout_call &call, int64_t begin, int64_t end), (call, begin, end))

}  // namespace

void ds_dropout(const ds_dropout_call *call, int32_t threads) {
    ds::for_each_run(
        1, threads, [&](int64_t) { return call->numel; },
        [&](int64_t, int64_t begin, int64_t end) { dropout_run(*call, begin, end); });
}
