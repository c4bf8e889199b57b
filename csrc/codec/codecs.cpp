// Packets of a few bits per element: signs, integers of 8 or 4 bits, and 8-bit floats, each block of elements with a scale.
//
// A packet holds the scales (fp32) of all its blocks, then the codes; deepspeed/comm/codecs.py says what they mean. Blocks
// are read from memory once: the pass that finds the scales of a few leaves them in the first-level cache, errors added,
// for the pass that encodes them, which writes what encoding took away as well. Sums of magnitudes are taken in fp64 in
// lanes, see [Note: lanes].
#include "divisor.h"
#include "lanes.h"
#include "small_floats.h"

namespace {

using ds::kBlock;

constexpr int64_t kScale = 4;             // bytes
constexpr float kRounder = 12582912.0f;   // 1.5 * 2^23: adding it rounds a small number to an integer, to nearest even
constexpr int64_t kSumLanes = 32;
constexpr int64_t kFetch = 64;            // elements that are encoded between two requests to memory
constexpr int64_t kAhead = 1024;          // elements whose scales are found before they are encoded

struct Work {
    const ds_packets *packets;
    void *values;
    int32_t dtype;
    float *errors;
    int64_t blocks;  // of a row
    bool sum;        // of all rows
};

DS_INLINE int32_t bits_of(const ds_packets &p) { return p.codes & 255; }

struct Block {
    int64_t row, index, begin, numel;  // `begin`: of its elements in the row
    int64_t first;                     // of its elements in all rows
};

DS_INLINE Block block_of(const Work &work, int64_t unit) {
    const ds_packets &p = *work.packets;
    const int64_t row = unit / work.blocks, index = unit % work.blocks, begin = index * p.block;
    const int64_t numel = p.numel - begin < p.block ? p.numel - begin : p.block;
    return {row, index, begin, numel, row * p.numel + begin};
}

DS_INLINE uint8_t *codes_of(const Work &work, int64_t row, int64_t element) {
    const ds_packets &p = *work.packets;
    return p.data + row * p.stride + work.blocks * kScale + element * bits_of(p) / 8;
}

DS_INLINE uint8_t *scale_of(const Work &work, const Block &block) {
    return work.packets->data + block.row * work.packets->stride + block.index * kScale;
}

// Elements [index, index + n) of all rows as fp32, at most kBlock: in the buffer, or where they are.
DS_INLINE const float *given(const Work &work, int64_t index, int64_t n, float *buffer) {
    return ds::widen(ds::at(static_cast<const void *>(work.values), index, work.dtype), work.dtype, buffer, n);
}

// The same with the errors that are owed, which a pass before has kept where the errors are.
DS_INLINE const float *wanted(const Work &work, int64_t index, int64_t n, float *buffer) {
    return work.errors == nullptr ? given(work, index, n, buffer) : work.errors + index;
}

// Blocks that come next travel to the cache while others, which are there, are encoded: as far ahead as the cache has
// room for what is read.
DS_INLINE void fetch_next(const Work &work, int64_t index, int64_t n) {
    const int64_t least = work.errors == nullptr ? 2 * kAhead : kAhead, block = work.packets->block;
    const int64_t ahead = index + (block < least ? least : block);
    ds::fetch<false>(ds::at(static_cast<const void *>(work.values), ahead, work.dtype), n * ds::item_size(work.dtype));
    if (work.errors != nullptr) ds::fetch<true>(work.errors + ahead, n * 4);
}

// ---- signs ----------------------------------------------------------------------------------------------------------

DS_INLINE double magnitude(float x) { return double(std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0x7fffffffu)); }

#if defined(__GNUC__)
using FourFloats = float __attribute__((vector_size(16)));
using FourBits = uint32_t __attribute__((vector_size(16)));
using FourDoubles = double __attribute__((vector_size(32)));
using EightFloats = float __attribute__((vector_size(32)));
using EightBits = uint32_t __attribute__((vector_size(32)));
using EightDoubles = double __attribute__((vector_size(64)));
#endif

template <int N>
DS_INLINE void add_magnitudes(double (&lane)[kSumLanes], const float *x, int64_t n) {
    int64_t i = 0;
#if defined(__GNUC__)  // vectors that every set has or has halves of, so that sums stay in registers
    using Floats = std::conditional_t<N == 16, EightFloats, FourFloats>;
    using Bits = std::conditional_t<N == 16, EightBits, FourBits>;
    using Doubles = std::conditional_t<N == 16, EightDoubles, FourDoubles>;
    constexpr int64_t width = sizeof(Floats) / sizeof(float);
    Doubles sums[kSumLanes / width];
    std::memcpy(sums, lane, sizeof sums);
    for (; i + kSumLanes <= n; i += kSumLanes) {
#pragma GCC unroll 8
        for (int64_t j = 0; j < kSumLanes / width; ++j) {
            Bits bits;
            std::memcpy(&bits, x + i + width * j, sizeof bits);
            sums[j] += __builtin_convertvector(Floats(bits & 0x7fffffffu), Doubles);
        }
    }
    std::memcpy(lane, sums, sizeof sums);
#else
    for (; i + kSumLanes <= n; i += kSumLanes)
        for (int64_t j = 0; j < kSumLanes; ++j) lane[j] += magnitude(x[i + j]);
#endif
    for (int64_t j = 0; i + j < n; ++j) lane[j] += magnitude(x[i + j]);
}

DS_INLINE double fold(double (&lane)[kSumLanes]) {
    for (int64_t width = kSumLanes / 2; width > 0; width /= 2)
        for (int64_t j = 0; j < width; ++j) lane[j] += lane[j + width];
    return lane[0];
}

// A bit for each of 16 numbers, the first the lowest: set for what is not negative.
DS_INLINE uint32_t bits_of_signs(const float *x) {
#if defined(__SSE2__)
    const __m128 zero = _mm_setzero_ps();
    const __m128i a = _mm_castps_si128(_mm_cmpge_ps(_mm_loadu_ps(x), zero));
    const __m128i b = _mm_castps_si128(_mm_cmpge_ps(_mm_loadu_ps(x + 4), zero));
    const __m128i c = _mm_castps_si128(_mm_cmpge_ps(_mm_loadu_ps(x + 8), zero));
    const __m128i d = _mm_castps_si128(_mm_cmpge_ps(_mm_loadu_ps(x + 12), zero));
    return uint32_t(_mm_movemask_epi8(_mm_packs_epi16(_mm_packs_epi32(a, b), _mm_packs_epi32(c, d))));
#else
    uint32_t bits = 0;
    for (uint32_t i = 0; i < 16; ++i) bits |= uint32_t(x[i] >= 0) << i;
    return bits;
#endif
}

DS_INLINE void pack_signs(uint8_t *codes, const float *x, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const uint16_t bits = uint16_t(bits_of_signs(x + i));
        codes[i / 8] = uint8_t(bits);
        codes[i / 8 + 1] = uint8_t(bits >> 8);
    }
    for (; i < n; i += 8) {
        uint32_t bits = 0;
        for (int64_t j = 0; j < 8 && i + j < n; ++j) bits |= uint32_t(x[i + j] >= 0) << j;
        codes[i / 8] = uint8_t(bits);
    }
}

// The mean of the magnitudes of a block.
template <int N>
DS_INLINE float mean_of(const Work &work, const Block &block) {
    alignas(64) float buffer[kBlock];
    alignas(64) double lane[kSumLanes] = {};
    for (int64_t i = 0; i < block.numel; i += kBlock) {
        const int64_t n = block.numel - i < kBlock ? block.numel - i : kBlock, index = block.first + i;
        const float *x = given(work, index, n, buffer);
        if (work.errors != nullptr) {
            float *errors = work.errors + index;
            DS_IVDEP for (int64_t j = 0; j < n; ++j) errors[j] = x[j] + errors[j];
            x = errors;
        }
        add_magnitudes<N>(lane, x, n);
    }
    return float(fold(lane) / double(block.numel));
}

DS_INLINE void encode_signs(uint8_t *codes, const float *x, float *errors, int64_t n, float mean) {
    pack_signs(codes, x, n);
    if (errors == nullptr) return;
    DS_IVDEP for (int64_t j = 0; j < n; ++j) errors[j] = x[j] - (x[j] >= 0 ? mean : -mean);
}

// 16 numbers of magnitude `scale`.
DS_INLINE void spread_signs(float *values, uint32_t bits, float scale) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(scale);
#if defined(__GNUC__)
    using Words = uint32_t __attribute__((vector_size(32)));
    const Words masks = {1, 2, 4, 8, 16, 32, 64, 128};
    const Words low = (Words((masks & bits) == 0) & 0x80000000u) ^ magnitude;
    const Words high = (Words(((masks << 8) & bits) == 0) & 0x80000000u) ^ magnitude;
    std::memcpy(values, &low, sizeof low);
    std::memcpy(values + 8, &high, sizeof high);
#else
    for (uint32_t i = 0; i < 16; ++i)
        values[i] = std::bit_cast<float>(magnitude ^ ((bits >> i) & 1u ? 0u : 0x80000000u));
#endif
}

DS_INLINE void unpack_signs(float *values, const uint8_t *codes, float scale, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) spread_signs(values + i, uint32_t(codes[i / 8]) | uint32_t(codes[i / 8 + 1]) << 8, scale);
    for (; i < n; ++i) values[i] = (codes[i / 8] >> (i % 8)) & 1 ? scale : -scale;
}

// ---- what a block's largest magnitude scales -------------------------------------------------------------------------

DS_INLINE int32_t largest_of(const Work &work, const Block &block) {
    alignas(64) float buffer[kBlock];
    int32_t largest = 0;
    for (int64_t i = 0; i < block.numel; i += kBlock) {
        const int64_t n = block.numel - i < kBlock ? block.numel - i : kBlock, index = block.first + i;
        if (work.errors == nullptr) {
            const void *memory = ds::at(static_cast<const void *>(work.values), index, work.dtype);
            largest = ds::largest_bits(largest, memory, work.dtype, n);
            continue;
        }
        const float *x = given(work, index, n, buffer);
        float *errors = work.errors + index;
        int32_t found = largest;
        DS_IVDEP for (int64_t j = 0; j < n; ++j) {
            const float sum = x[j] + errors[j];
            const int32_t bits = std::bit_cast<int32_t>(sum) & 0x7fffffff;
            errors[j] = sum;
            found = bits > found ? bits : found;
        }
        largest = found;
    }
    return largest;
}

DS_INLINE void pack_halves(uint8_t *codes, const uint8_t *integers, int64_t n) {
    for (int64_t i = 0; i < n / 2; ++i) {
        uint16_t pair;  // the first in its lower byte
        std::memcpy(&pair, integers + 2 * i, sizeof pair);
        if constexpr (std::endian::native == std::endian::big) pair = uint16_t(pair >> 8 | pair << 8);
        codes[i] = uint8_t((pair & 15) | ((pair >> 4) & 0xf0));
    }
    if (n % 2) codes[n / 2] = uint8_t(integers[n - 1] & 15);
}

template <class Form, bool kFused>
DS_INLINE void encode_all(uint8_t *codes, const float *x, float *errors, int64_t n, const ds::Divisor &divisor,
                             float scale) {
    alignas(64) uint8_t whole[kFetch];
    uint8_t *target = Form::bits == 8 ? codes : whole;
    float rounded;
    if (errors == nullptr) {
        DS_IVDEP for (int64_t j = 0; j < n; ++j) target[j] = Form::template encode<kFused>(x[j], divisor, rounded);
    } else {
        DS_IVDEP for (int64_t j = 0; j < n; ++j) {
            const float wanted = x[j];
            float number;
            target[j] = Form::template encode<kFused>(wanted, divisor, number);
            errors[j] = wanted - number * scale;
        }
    }
    if constexpr (Form::bits == 4) pack_halves(codes, whole, n);
}

// Codes of at most kFetch numbers, and in `errors` what they take away.
template <class Form, int N>
DS_INLINE void encode_scaled(uint8_t *codes, const float *x, float *errors, int64_t n, const ds::Divisor &divisor,
                             float scale) {
    if (divisor.usual)
        encode_all<Form, ds::kHasFused<N>>(codes, x, errors, n, divisor, scale);
    else
        encode_all<Form, false>(codes, x, errors, n, divisor, scale);
}

// ---- integers -------------------------------------------------------------------------------------------------------

template <int32_t kBits>
struct Integers {
    static constexpr int32_t bits = kBits;
    static constexpr float most = float((1 << (bits - 1)) - 1);

    // `number`: what the code, the lowest bits of a whole number, stands for.
    template <bool kFused>
    static DS_INLINE_MEMBER uint8_t encode(float x, const ds::Divisor &divisor, float &number) {
        float q = ds::quotient<kFused>(x, divisor);
        if constexpr (!kFused) {
            q = q > most ? most : q;
            q = q < -most ? -most : q;
            q = q == q ? q : 0.0f;  // of a block that is not finite
        }
        const float sum = q + kRounder;
        number = sum - kRounder;
        return uint8_t(std::bit_cast<uint32_t>(sum));
    }
};

template <int32_t bits>
DS_INLINE void unpack_integers(float *values, const uint8_t *codes, float scale, int64_t n) {
    if constexpr (bits == 8) {
        DS_IVDEP for (int64_t i = 0; i < n; ++i) values[i] = float(int8_t(codes[i])) * scale;
    } else {
        DS_IVDEP for (int64_t i = 0; i < n / 2; ++i) {
            const int32_t code = codes[i];
            values[2 * i] = float(((code & 15) ^ 8) - 8) * scale;
            values[2 * i + 1] = float(((code >> 4) ^ 8) - 8) * scale;
        }
        if (n % 2) values[n - 1] = float(((codes[n / 2] & 15) ^ 8) - 8) * scale;
    }
}

// ---- floats ---------------------------------------------------------------------------------------------------------

// e4m3 without infinities.
struct Floats {
    static constexpr int32_t bits = 8;
    static constexpr float most = ds::E4M3::largest;

    template <bool kFused>
    static DS_INLINE_MEMBER uint8_t encode(float x, const ds::Divisor &divisor, float &number) {
        float q = ds::quotient<kFused>(x, divisor);
        if constexpr (kFused) return uint8_t(ds::round_small<ds::E4M3>(q, x, number));
        q = q > most ? most : q;
        q = q < -most ? -most : q;
        const uint32_t code = ds::round_small<ds::E4M3>(q, q, number);
        number = q == q ? number : q;
        return uint8_t(q == q ? code : 0x7fu | (code & 0x80u));
    }
};

DS_INLINE void unpack_floats(float *values, const uint8_t *codes, float scale, int64_t n) {
    DS_IVDEP for (int64_t i = 0; i < n; ++i) values[i] = ds::widen_small<ds::E4M3>(codes[i]) * scale;
}

// ---- rows -----------------------------------------------------------------------------------------------------------

DS_INLINE void unpack(const Work &work, const Block &block, int64_t i, int64_t n, float *values) {
    float scale;
    std::memcpy(&scale, scale_of(work, block), kScale);
    const uint8_t *codes = codes_of(work, block.row, block.begin + i);
    switch (work.packets->codes) {
        case DS_SIGNS: return unpack_signs(values, codes, scale, n);
        case DS_INTEGERS4: return unpack_integers<4>(values, codes, scale, n);
        case DS_FLOATS8: return unpack_floats(values, codes, scale, n);
        default: return unpack_integers<8>(values, codes, scale, n);
    }
}

template <int N>
DS_INLINE float find_scale(const Work &work, const Block &block) {
    switch (work.packets->codes) {
        case DS_SIGNS: return mean_of<N>(work, block);
        case DS_INTEGERS4: return std::bit_cast<float>(largest_of(work, block)) / Integers<4>::most;
        case DS_FLOATS8: return std::bit_cast<float>(largest_of(work, block)) / Floats::most;
        default: return std::bit_cast<float>(largest_of(work, block)) / Integers<8>::most;
    }
}

template <int N>
DS_INLINE void encode_block(const Work &work, const Block &block) {
    alignas(64) float buffer[kFetch];
    float scale;
    std::memcpy(&scale, scale_of(work, block), kScale);
    const ds::Divisor divisor = ds::divisor_of(scale > 0 ? scale : 1.0f);
    for (int64_t i = 0; i < block.numel; i += kFetch) {
        const int64_t n = block.numel - i < kFetch ? block.numel - i : kFetch, index = block.first + i;
        fetch_next(work, index, n);
        const float *x = wanted(work, index, n, buffer);
        float *errors = work.errors == nullptr ? nullptr : work.errors + index;
        uint8_t *codes = codes_of(work, block.row, block.begin + i);
        switch (work.packets->codes) {
            case DS_SIGNS: encode_signs(codes, x, errors, n, scale); break;
            case DS_INTEGERS4: encode_scaled<Integers<4>, N>(codes, x, errors, n, divisor, scale); break;
            case DS_FLOATS8: encode_scaled<Floats, N>(codes, x, errors, n, divisor, scale); break;
            default: encode_scaled<Integers<8>, N>(codes, x, errors, n, divisor, scale); break;
        }
    }
}

template <int N>
DS_INLINE void encode_run_body(const Work &work, int64_t begin, int64_t end) {
    const int64_t several = work.packets->block < kAhead ? kAhead / work.packets->block : 1;
    for (int64_t first = begin; first < end; first += several) {
        const int64_t last = first + several < end ? first + several : end;
        for (int64_t unit = first; unit < last; ++unit) {
            const Block block = block_of(work, unit);
            const float scale = find_scale<N>(work, block);
            std::memcpy(scale_of(work, block), &scale, kScale);
        }
        for (int64_t unit = first; unit < last; ++unit) encode_block<N>(work, block_of(work, unit));
    }
}

DS_INLINE void decode_run_body(const Work &work, int64_t begin, int64_t end) {
    alignas(64) float total[kBlock], buffer[kBlock];
    for (int64_t unit = begin; unit < end; ++unit) {
        Block block = block_of(work, unit);
        for (int64_t i = 0; i < block.numel; i += kBlock) {
            const int64_t n = block.numel - i < kBlock ? block.numel - i : kBlock;
            void *target = ds::at(work.values, block.first + i, work.dtype);
            float *result = work.dtype == DS_FLOAT32 ? static_cast<float *>(target) : total;
            if (work.sum) {
                std::memset(result, 0, size_t(n) * sizeof(float));
                for (block.row = 0; block.row < work.packets->rows; ++block.row) {
                    unpack(work, block, i, n, buffer);
                    DS_IVDEP for (int64_t j = 0; j < n; ++j) result[j] += buffer[j];
                }
            } else {
                unpack(work, block, i, n, result);
            }
            ds::narrow(target, work.dtype, result, n);
        }
    }
}

DS_LANES_KERNEL(encode_run, (const Work &work, int64_t begin, int64_t end), (work, begin, end))
DS_KERNEL(decode_run, (const Work &work, int64_t begin, int64_t end), (work, begin, end))

int64_t blocks_of(const ds_packets &p) { return (p.numel + p.block - 1) / p.block; }

template <class Run>
void for_each_block(const Work &work, int64_t rows, int32_t threads, Run &&run) {
    ds::for_each_share(rows * work.blocks, rows * work.packets->numel, threads, run);
}

}  // namespace

void ds_encode(const ds_packets *packets, const void *values, int32_t dtype, float *errors, int32_t threads) {
    const ds_packets &p = *packets;
    const Work work{packets, const_cast<void *>(values), dtype, errors, blocks_of(p), false};
    for (int64_t row = 0; row < p.rows; ++row) {  // a row's end is padding
        const int64_t used = work.blocks * kScale + (p.numel * bits_of(p) + 7) / 8;
        std::memset(p.data + row * p.stride + used, 0, size_t(p.stride - used));
    }
    for_each_block(work, p.rows, threads, [&](int64_t begin, int64_t end) { encode_run(work, begin, end); });
}

void ds_decode(const ds_packets *packets, void *values, int32_t dtype, int32_t sum, int32_t threads) {
    const Work work{packets, values, dtype, nullptr, blocks_of(*packets), sum != 0};
    for_each_block(work, sum ? 1 : packets->rows, threads,
                   [&](int64_t begin, int64_t end) { decode_run(work, begin, end); });
}
