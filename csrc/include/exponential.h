// The exponential function of softmax, in operations that every instruction set rounds alike.
#pragma once

#include "kernel.h"

namespace ds {

// `yes` if the condition holds, else `no`, as loops of the compiler's vectors have it: without a branch.
DS_INLINE float choose(bool condition, float yes, float no) {
    const uint32_t mask = -uint32_t(condition);
    return std::bit_cast<float>((std::bit_cast<uint32_t>(yes) & mask) | (std::bit_cast<uint32_t>(no) & ~mask));
}

// exp(x) for x <= 0 to about one unit in the last place; 0 below the smallest normal number.
DS_INLINE float exponential(float given) {
    const bool tiny = given < -87.0f;
    const float x = choose(tiny, -87.0f, given);
    const float whole = float(int32_t(x * 1.44269504f - 0.5f));  // to nearest, as x is not positive
    const float rest = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = (sum * rest) * rest + rest + 1.0f;
    const float power = std::bit_cast<float>(uint32_t(int32_t(whole) + 127) << 23);
    return choose(tiny, 0.0f, sum * power);
}

}  // namespace ds
