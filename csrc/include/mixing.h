// A hash of 32 bits, for numbers that look random and depend on nothing but an index and a seed.
#pragma once

#include "kernel.h"

namespace ds {

DS_INLINE uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

}  // namespace ds
