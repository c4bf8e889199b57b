// Division of many numbers by one, for codes of few bits: the same codes as division itself gives, without its cost.
//
// [Note: division] Codes are defined by rounded quotients x / d, and a processor divides 16 numbers in the time of ten or
// more other operations. x * inverse + (x * rest), where inverse + rest is 1 / d to 48 bits, fused so that the sum is
// rounded once (N. Brisebarre, J.-M. Muller 2008, Correctly rounded multiplication by arbitrary precision constants), is
// the rounded quotient for nearly all x and d, and where it is not, it is off by a unit in the last place. A code could
// only change where the quotient is within that of a tie of codes; there are at most 128 of them in a binade, so all d
// and all x near them can be tried, and have been: none changes (tests/ops/test_quotients.py tries a part of them).
#pragma once

#include "kernel.h"

namespace ds {

struct Divisor {
    float by, inverse, rest;
    bool usual;  // far from the ends of the range of fp32, so that nothing here is rounded as a subnormal number
};

DS_INLINE Divisor divisor_of(float by) {
    const double exact = 1.0 / double(by);
    const float inverse = float(exact);
    return {by, inverse, float(exact - double(inverse)), by > 0x1p-96f && by < 0x1p96f};
}

// Of a quotient that is zero the sign may be another. Fused only where the set has the instruction, and by a usual
// divisor.
template <bool kFused>
DS_INLINE float quotient(float x, const Divisor &divisor) {
#if defined(__GNUC__)
    if constexpr (kFused) return __builtin_fmaf(x, divisor.inverse, x * divisor.rest);
#endif
    return x / divisor.by;
}

// Sets with registers of so many lanes have fused operations.
template <int N>
constexpr bool kHasFused = N > 4;

}  // namespace ds
