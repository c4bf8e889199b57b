// Elementwise combination of equal chunks, one per rank, in rank order.
#pragma once

#include <cstdint>

namespace ds::shm {

int64_t item_bytes(int32_t dtype);

// output = (inputs[0] + inputs[1] + ...) * scale; the output may be one of the inputs. Reductions to another dtype are
// for the three dtypes of ds_reduce_chunks only; integers are not scaled.
void sum_chunks(void *output, int32_t output_dtype, const void *const *inputs, int32_t count, int32_t input_dtype,
                int64_t numel, double scale);

// output = max(inputs[0], inputs[1], ...), NaN where one is NaN.
void max_chunks(void *output, const void *const *inputs, int32_t count, int32_t dtype, int64_t numel);

}  // namespace ds::shm
