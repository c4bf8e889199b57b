// Floating-point numbers of 4 to 12 bits in groups with a scale each (deepspeed/ops/fp_quantizer).
//
// A group is read from memory once: what finds its scale leaves it in the first-level cache. [Note: rounding] A magnitude
// plus 2^(e + 23 - mantissa), where 2^e is the lower end of its binade (of the format's smallest one, for subnormal
// numbers), is rounded by that addition to the format's steps, to nearest even, and the sum's lowest bits count them.
#include <atomic>

#include "kernel.h"

namespace {

using ds::kBlock;

template <int kExponent, int kMantissa, uint32_t kCodes>
struct Format {
    static constexpr uint32_t bits = 1 + kExponent + kMantissa, shift = 23 - kMantissa, sign = 1u << (bits - 1);
    static constexpr uint32_t bias = (1u << (kExponent - 1)) - 1, rebias = 127 - bias;
    static constexpr uint32_t smallest = (rebias + 1) << 23;  // the lowest normal number, as fp32
    static constexpr uint32_t codes = kCodes, mantissa = kMantissa;
    static constexpr float largest = std::bit_cast<float>(((kCodes - 1) << shift) + (rebias << 23));
    using Code = std::conditional_t<(bits > 8), uint16_t, uint8_t>;
};
using E2M1 = Format<2, 1, 8>;
using E3M2 = Format<3, 2, 32>;
using E4M3 = Format<4, 3, 127>;
using E7M4 = Format<7, 4, 2048>;

template <class F>
DS_INLINE uint32_t encode(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu;
    uint32_t binade = bits & 0x7f800000u;
    binade = binade > F::smallest ? binade : F::smallest;
    const uint32_t rounder = binade + (F::shift << 23);
    const float sum = std::bit_cast<float>(magnitude) + std::bit_cast<float>(rounder);
    const uint32_t steps = std::bit_cast<uint32_t>(sum) - rounder;
    uint32_t code = (binade >> F::shift) + steps - ((F::rebias + 1) << F::mantissa);
    code = code < F::codes - 1 ? code : F::codes - 1;
    return code | ((bits >> (32 - F::bits)) & F::sign);
}

template <class F>
DS_INLINE float decode(uint32_t code) {
    const uint32_t magnitude = code & (F::sign - 1u), shifted = magnitude << F::shift;
    const float subnormal = std::bit_cast<float>(shifted + F::smallest) - std::bit_cast<float>(F::smallest);
    const float normal = std::bit_cast<float>(shifted + (F::rebias << 23));
    float value = magnitude < (1u << F::mantissa) ? subnormal : normal;
    if constexpr (F::codes < F::sign)
        value = magnitude >= F::codes ? std::bit_cast<float>(0x7fc00000u) : value;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | ((code & F::sign) << (32 - F::bits)));
}

// ---- packing: the first code in the lowest bits ---------------------------------------------------------------------

// 48 bits: eight codes of 6 bits, or four of 12, each in a byte or two of a word.
template <class Code>
DS_INLINE uint64_t gather(uint64_t x) {
    if constexpr (sizeof(Code) == 1) {
        x = (x & 0x003f003f003f003full) | ((x & 0x3f003f003f003f00ull) >> 2);
        x = (x & 0x00000fff00000fffull) | ((x & 0x0fff00000fff0000ull) >> 4);
    } else {
        x = (x & 0x00000fff00000fffull) | ((x & 0x0fff00000fff0000ull) >> 4);
    }
    return (x & 0x0000000000ffffffull) | ((x & 0x00ffffff00000000ull) >> 8);
}

template <class Code>
DS_INLINE uint64_t scatter(uint64_t x) {
    x = (x & 0x0000000000ffffffull) | ((x & 0x0000ffffff000000ull) << 8);
    x = (x & 0x00000fff00000fffull) | ((x & 0x00fff00000fff000ull) << 4);
    if constexpr (sizeof(Code) == 1) x = (x & 0x003f003f003f003full) | ((x & 0x0fc00fc00fc00fc0ull) << 2);
    return x;
}

constexpr int64_t kWord = 8, kPacked = 6;  // bytes

// `n` codes, a multiple of what a byte or three hold, in whole words of which the last may have unused codes.
template <class F>
DS_INLINE void pack(uint8_t *to, const typename F::Code *codes, int64_t n) {
    using Code = typename F::Code;
    const int64_t bytes = n * F::bits / 8;
    if constexpr (F::bits == 8) {
        std::memcpy(to, codes, size_t(n));
    } else if constexpr (F::bits == 4) {
        DS_IVDEP for (int64_t i = 0; i < bytes; ++i) to[i] = uint8_t(codes[2 * i] | (codes[2 * i + 1] << 4));
    } else {
        const int64_t words = (bytes + kPacked - 1) / kPacked;
        alignas(64) uint64_t word[kBlock * sizeof(Code) / kWord];
        std::memcpy(word, codes, size_t(words * kWord));
        DS_IVDEP for (int64_t i = 0; i < words; ++i) word[i] = gather<Code>(word[i]);
        int64_t i = 0;
        for (; i * kPacked + kWord <= bytes; ++i) std::memcpy(to + i * kPacked, word + i, kWord);
        for (; i < words; ++i) {
            const int64_t left = bytes - i * kPacked;
            std::memcpy(to + i * kPacked, word + i, size_t(left < kPacked ? left : kPacked));
        }
    }
}

template <class F>
DS_INLINE void unpack(typename F::Code *codes, const uint8_t *from, int64_t n) {
    using Code = typename F::Code;
    const int64_t bytes = n * F::bits / 8;
    if constexpr (F::bits == 8) {
        std::memcpy(codes, from, size_t(n));
    } else if constexpr (F::bits == 4) {
        DS_IVDEP for (int64_t i = 0; i < bytes; ++i) {
            codes[2 * i] = from[i] & 15;
            codes[2 * i + 1] = from[i] >> 4;
        }
    } else {
        const int64_t words = (bytes + kPacked - 1) / kPacked;
        alignas(64) uint64_t word[kBlock * sizeof(Code) / kWord];
        int64_t i = 0;
        for (; i * kPacked + kWord <= bytes; ++i) std::memcpy(word + i, from + i * kPacked, kWord);
        for (; i < words; ++i) {
            const int64_t left = bytes - i * kPacked;
            std::memcpy(word + i, from + i * kPacked, size_t(left < kPacked ? left : kPacked));
        }
        DS_IVDEP for (int64_t j = 0; j < words; ++j) word[j] = scatter<Code>(word[j]);
        std::memcpy(codes, word, size_t(words * kWord));
    }
}

// ---- groups ---------------------------------------------------------------------------------------------------------

struct Work {
    const ds_float_groups *groups;
    void *values;
    int32_t dtype;
    int32_t *infinite;  // set by a group with a number that is none, or is not finite
};

DS_INLINE const float *values_of(const Work &work, int64_t index, float *buffer, int64_t n) {
    return ds::widen(ds::at(static_cast<const void *>(work.values), index, work.dtype), work.dtype, buffer, n);
}

// Elements of the group from `first` on: some of the last group's are missing, and count as zeros.
DS_INLINE int64_t present(const ds_float_groups &g, int64_t first, int64_t n) {
    const int64_t left = g.numel - first;
    return left < 0 ? 0 : left < n ? left : n;
}

template <class F>
DS_INLINE void encode_group(const Work &work, int64_t group) {
    const ds_float_groups &g = *work.groups;
    const int64_t begin = group * g.group;
    alignas(64) float buffer[kBlock];
    alignas(64) typename F::Code codes[kBlock];
    int32_t largest = 0;
    const float *x = nullptr;
    for (int64_t i = 0; i < g.group; i += kBlock) {
        const int64_t n = present(g, begin + i, g.group - i < kBlock ? g.group - i : kBlock);
        if (n > 0) largest = ds::largest_bits(largest, x = values_of(work, begin + i, buffer, n), n);
    }
    if (largest >= 0x7f800000) *work.infinite = 1;
    float scale = std::bit_cast<float>(largest) / F::largest;
    scale = scale < 0x1p-126f ? 0x1p-126f : scale;
    if (largest == 0) scale = 1.0f;
    std::memcpy(g.scales + group * g.scale_stride, &scale, sizeof scale);
    for (int64_t i = 0; i < g.group; i += kBlock) {
        const int64_t whole = g.group - i < kBlock ? g.group - i : kBlock, n = present(g, begin + i, whole);
        if (g.group > kBlock && n > 0) x = values_of(work, begin + i, buffer, n);
        DS_IVDEP for (int64_t j = 0; j < n; ++j) codes[j] = typename F::Code(encode<F>(x[j] / scale));
        for (int64_t j = n; j < whole; ++j) codes[j] = 0;
        pack<F>(g.codes + group * g.stride + i * F::bits / 8, codes, whole);
    }
}

template <class F>
DS_INLINE void decode_group(const Work &work, int64_t group) {
    const ds_float_groups &g = *work.groups;
    const int64_t begin = group * g.group;
    alignas(64) float buffer[kBlock];
    alignas(64) typename F::Code codes[kBlock];
    float scale;
    std::memcpy(&scale, g.scales + group * g.scale_stride, sizeof scale);
    for (int64_t i = 0; i < g.group; i += kBlock) {
        const int64_t whole = g.group - i < kBlock ? g.group - i : kBlock, n = present(g, begin + i, whole);
        if (n == 0) break;
        unpack<F>(codes, g.codes + group * g.stride + i * F::bits / 8, whole);
        void *target = ds::at(work.values, begin + i, work.dtype);
        float *values = work.dtype == DS_FLOAT32 ? static_cast<float *>(target) : buffer;
        DS_IVDEP for (int64_t j = 0; j < n; ++j) values[j] = decode<F>(codes[j]) * scale;
        ds::narrow(target, work.dtype, values, n);
    }
}

DS_INLINE void encode_groups_body(const Work &work, int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) switch (work.groups->bits) {
            case 4: encode_group<E2M1>(work, group); break;
            case 6: encode_group<E3M2>(work, group); break;
            case 8: encode_group<E4M3>(work, group); break;
            default: encode_group<E7M4>(work, group); break;
        }
}

DS_INLINE void decode_groups_body(const Work &work, int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) switch (work.groups->bits) {
            case 4: decode_group<E2M1>(work, group); break;
            case 6: decode_group<E3M2>(work, group); break;
            case 8: decode_group<E4M3>(work, group); break;
            default: decode_group<E7M4>(work, group); break;
        }
}

DS_KERNEL(encode_groups, (const Work &work, int64_t begin, int64_t end), (work, begin, end))
DS_KERNEL(decode_groups, (const Work &work, int64_t begin, int64_t end), (work, begin, end))

template <class Run>
void for_each_group(const ds_float_groups &g, int32_t threads, Run &&run) {
    ds::for_each_share((g.numel + g.group - 1) / g.group, g.numel, threads, run);
}

}  // namespace

int32_t ds_encode_floats(const ds_float_groups *groups, const void *values, int32_t dtype, int32_t threads) {
    std::atomic<int32_t> infinite = 0;
    for_each_group(*groups, threads, [&](int64_t begin, int64_t end) {
        int32_t found = 0;
        const Work work{groups, const_cast<void *>(values), dtype, &found};
        encode_groups(work, begin, end);
        if (found != 0) infinite = 1;
    });
    return infinite;
}

void ds_decode_floats(const ds_float_groups *groups, void *values, int32_t dtype, int32_t threads) {
    const Work work{groups, values, dtype, nullptr};
    for_each_group(*groups, threads, [&](int64_t begin, int64_t end) { decode_groups(work, begin, end); });
}
