// Sums of squares for gradient norms; a non-finite element makes the result non-finite.
#include <vector>

#include "sums.h"

namespace {

DS_INLINE void squares_run_body(const ds_span &span, double *sums, int64_t begin, int64_t end) {
    const int32_t dtype = int32_t(span.dtype);
    alignas(64) float buffer[ds::kBlock];
    for (int64_t i = begin; i < end; i += ds::kBlock) {
        const int64_t n = end - i < ds::kBlock ? end - i : ds::kBlock;
        sums[i / ds::kBlock] = ds::block_sum_of_squares(ds::widen(ds::at(span.data, i, dtype), dtype, buffer, n), n);
    }
}

DS_KERNEL(squares_run, (const ds_span &span, double *sums, int64_t begin, int64_t end), (span, sums, begin, end))

}  // namespace

double ds_sum_of_squares(const ds_span *spans, int64_t count, double *sums, int32_t threads) {
    static thread_local std::vector<int64_t> first_blocks;
    static thread_local std::vector<double> partials;
    first_blocks.assign(size_t(count) + 1, 0);
    for (int64_t i = 0; i < count; ++i)
        first_blocks[size_t(i) + 1] = first_blocks[size_t(i)] + ds::block_count(spans[i].numel);
    partials.resize(size_t(first_blocks.back()));
    const int64_t *first_block = first_blocks.data();
    double *partial = partials.data();
    ds::for_each_run(
        count, threads, [&](int64_t i) { return spans[i].numel; },
        [&](int64_t i, int64_t begin, int64_t end) { squares_run(spans[i], partial + first_block[i], begin, end); });
    double total = 0.0;
    for (int64_t i = 0; i < count; ++i) {
        double sum = 0.0;
        for (int64_t b = first_block[i]; b < first_block[i + 1]; ++b) sum += partial[b];
        sums[i] = sum;
        total += sum;
    }
    return total;
}
