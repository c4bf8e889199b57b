// Floating-point numbers of 4 to 12 bits: a sign, kExponent bits, kMantissa bits; kCodes magnitudes, the others are no
// numbers.
//
// [Note: rounding] A magnitude plus 2^(e + 23 - mantissa), where 2^e is the lower end of its binade (of the format's
// smallest one, for subnormal numbers), is rounded by that addition to the format's steps, to nearest even, and the sum's
// lowest bits count them.
#pragma once

#include "kernel.h"

namespace ds {

template <int kExponent, int kMantissa, uint32_t kCodes>
struct SmallFloat {
    static constexpr uint32_t bits = 1 + kExponent + kMantissa, shift = 23 - kMantissa, sign = 1u << (bits - 1);
    static constexpr uint32_t bias = (1u << (kExponent - 1)) - 1, rebias = 127 - bias;
    static constexpr uint32_t smallest = (rebias + 1) << 23;  // the lowest normal number, as fp32
    static constexpr uint32_t codes = kCodes, mantissa = kMantissa;
    static constexpr float largest = std::bit_cast<float>(((kCodes - 1) << shift) + (rebias << 23));
    using Code = std::conditional_t<(bits > 8), uint16_t, uint8_t>;
};
using E2M1 = SmallFloat<2, 1, 8>;
using E3M2 = SmallFloat<3, 2, 32>;
using E4M3 = SmallFloat<4, 3, 127>;
using E7M4 = SmallFloat<7, 4, 2048>;

// The code of a number that is not larger than the largest by more than half a step, with the sign of `like`; of others
// some code. `rounded` becomes what the code stands for.
template <class F>
DS_INLINE uint32_t round_small(float x, float like, float &rounded) {
    const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu;
    uint32_t binade = bits & 0x7f800000u;
    binade = binade > F::smallest ? binade : F::smallest;
    const uint32_t rounder = binade + (F::shift << 23);
    const float sum = std::bit_cast<float>(magnitude) + std::bit_cast<float>(rounder);
    const uint32_t code = ((binade - F::smallest) >> F::shift) + (std::bit_cast<uint32_t>(sum) - rounder);
    const uint32_t sign = std::bit_cast<uint32_t>(like) & 0x80000000u;
    rounded = std::bit_cast<float>(std::bit_cast<uint32_t>(sum - std::bit_cast<float>(rounder)) | sign);
    const uint32_t both = code | sign >> (32 - F::bits), most = 2 * F::sign - 1;
    return both < most ? both : most;
}

template <class F>
DS_INLINE float widen_small(uint32_t code) {
    const uint32_t magnitude = code & (F::sign - 1u), shifted = magnitude << F::shift;
    const float subnormal = std::bit_cast<float>(shifted + F::smallest) - std::bit_cast<float>(F::smallest);
    const float normal = std::bit_cast<float>(shifted + (F::rebias << 23));
    float value = magnitude < (1u << F::mantissa) ? subnormal : normal;
    if constexpr (F::codes < F::sign)
        value = magnitude >= F::codes ? std::bit_cast<float>(0x7fc00000u) : value;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | ((code & F::sign) << (32 - F::bits)));
}

}  // namespace ds
