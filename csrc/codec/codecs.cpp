// Packets of a few bits per element: signs, integers of 8 or 4 bits, and 8-bit floats, each block of elements with a scale.
//
// A packet holds the scales (fp32) of all its blocks, then the codes; deepspeed/comm/codecs.py says what they mean. A block
// is read from memory once: the pass that finds its scale leaves it in the first-level cache for the pass that encodes it,
// which writes what encoding took away as well. Sums of magnitudes are taken in fp64 in lanes, see [Note: lanes].
#include "lanes.h"

namespace {

using ds::kBlock;

constexpr int64_t kScale = 4;             // bytes
constexpr float kRounder = 12582912.0f;   // 1.5 * 2^23: adding it rounds a small number to an integer, to nearest even
constexpr int64_t kSumLanes = 32;
constexpr int64_t kFetch = 128;           // elements that are encoded between two requests to memory

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
};

DS_INLINE Block block_of(const Work &work, int64_t unit) {
    const ds_packets &p = *work.packets;
    const int64_t row = unit / work.blocks, index = unit % work.blocks, begin = index * p.block;
    return {row, index, begin, p.numel - begin < p.block ? p.numel - begin : p.block};
}

DS_INLINE uint8_t *codes_of(const Work &work, int64_t row, int64_t element) {
    const ds_packets &p = *work.packets;
    return p.data + row * p.stride + work.blocks * kScale + element * bits_of(p) / 8;
}

DS_INLINE uint8_t *scale_of(const Work &work, const Block &block) {
    return work.packets->data + block.row * work.packets->stride + block.index * kScale;
}

// Elements [index, index + n) of all rows as fp32, with the errors that are owed: in the buffer, or where they are.
DS_INLINE const float *wanted(const Work &work, int64_t index, int64_t n, float *buffer) {
    const float *values = ds::widen(ds::at(static_cast<const void *>(work.values), index, work.dtype), work.dtype,
                                    buffer, n);
    if (work.errors == nullptr) return values;
    const float *errors = work.errors + index;
    DS_IVDEP for (int64_t i = 0; i < n; ++i) buffer[i] = values[i] + errors[i];
    return buffer;
}

// The block that comes next travels to the cache while this one, which is there, is encoded.
DS_INLINE void fetch_next(const Work &work, int64_t index, int64_t n) {
#if defined(__GNUC__)
    const int64_t ahead = index + work.packets->block, step = 64 / ds::item_size(work.dtype);
    for (int64_t i = 0; i < n; i += step)
        __builtin_prefetch(ds::at(static_cast<const void *>(work.values), ahead + i, work.dtype));
    if (work.errors == nullptr) return;
    for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(work.errors + ahead + i, 1);
#endif
}

// ---- signs ----------------------------------------------------------------------------------------------------------

DS_INLINE double magnitude(float x) { return double(std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0x7fffffffu)); }

DS_INLINE void add_magnitudes(double (&lane)[kSumLanes], const float *x, int64_t n) {
    int64_t i = 0;
#if defined(__GNUC__)  // vectors that every set has or has halves of, so that sums stay in registers
    using Floats = float __attribute__((vector_size(16)));
    using Bits = uint32_t __attribute__((vector_size(16)));
    using Doubles = double __attribute__((vector_size(32)));
    Doubles sums[kSumLanes / 4];
    std::memcpy(sums, lane, sizeof sums);
    for (; i + kSumLanes <= n; i += kSumLanes) {
#pragma GCC unroll 8
        for (int64_t j = 0; j < kSumLanes / 4; ++j) {
            Bits bits;
            std::memcpy(&bits, x + i + 4 * j, sizeof bits);
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

DS_INLINE void encode_signs(const Work &work, const Block &block) {
    alignas(64) float buffer[kBlock];
    alignas(64) double lane[kSumLanes] = {};
    const int64_t first = block.row * work.packets->numel + block.begin;
    for (int64_t i = 0; i < block.numel; i += kBlock) {
        const int64_t n = block.numel - i < kBlock ? block.numel - i : kBlock;
        add_magnitudes(lane, wanted(work, first + i, n, buffer), n);
    }
    const float mean = float(fold(lane) / double(block.numel));
    std::memcpy(scale_of(work, block), &mean, kScale);
    for (int64_t i = 0; i < block.numel; i += kFetch) {
        const int64_t n = block.numel - i < kFetch ? block.numel - i : kFetch;
        fetch_next(work, first + i, n);
        const float *x = wanted(work, first + i, n, buffer);
        pack_signs(codes_of(work, block.row, block.begin + i), x, n);
        if (work.errors == nullptr) continue;
        float *errors = work.errors + first + i;
        DS_IVDEP for (int64_t j = 0; j < n; ++j) errors[j] = buffer[j] - (buffer[j] >= 0 ? mean : -mean);
    }
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

// ---- integers -------------------------------------------------------------------------------------------------------

// Writes a block's scale, with which its largest magnitude becomes `most`.
DS_INLINE float write_scale(const Work &work, const Block &block, float most, float *buffer) {
    const int64_t first = block.row * work.packets->numel + block.begin;
    int32_t largest = 0;
    for (int64_t i = 0; i < block.numel; i += kBlock) {
        const int64_t n = block.numel - i < kBlock ? block.numel - i : kBlock;
        largest = ds::largest_bits(largest, wanted(work, first + i, n, buffer), n);
    }
    const float scale = std::bit_cast<float>(largest) / most;
    std::memcpy(scale_of(work, block), &scale, kScale);
    return scale;
}

DS_INLINE void pack_halves(uint8_t *codes, const int8_t *integers, int64_t n) {
    for (int64_t i = 0; i < n / 2; ++i) {
        uint16_t pair;  // the first in its lower byte
        std::memcpy(&pair, integers + 2 * i, sizeof pair);
        if constexpr (std::endian::native == std::endian::big) pair = uint16_t(pair >> 8 | pair << 8);
        codes[i] = uint8_t((pair & 15) | ((pair >> 4) & 0xf0));
    }
    if (n % 2) codes[n / 2] = uint8_t(integers[n - 1] & 15);
}

template <int32_t bits>
DS_INLINE void encode_integers(const Work &work, const Block &block) {
    constexpr float most = float((1 << (bits - 1)) - 1);
    alignas(64) float buffer[kBlock];
    alignas(64) int8_t whole[kFetch];
    const int64_t first = block.row * work.packets->numel + block.begin;
    const float scale = write_scale(work, block, most, buffer), divisor = scale > 0 ? scale : 1.0f;
    for (int64_t i = 0; i < block.numel; i += kFetch) {
        const int64_t n = block.numel - i < kFetch ? block.numel - i : kFetch;
        fetch_next(work, first + i, n);
        const float *x = wanted(work, first + i, n, buffer);
        uint8_t *codes = codes_of(work, block.row, block.begin + i);
        int8_t *integers = bits == 8 ? reinterpret_cast<int8_t *>(codes) : whole;
        DS_IVDEP for (int64_t j = 0; j < n; ++j) {
            float q = x[j] / divisor;
            q = q > most ? most : q;
            q = q < -most ? -most : q;
            q = q == q ? q : 0.0f;  // of a block that is not finite
            integers[j] = int8_t(std::bit_cast<int32_t>(q + kRounder) - std::bit_cast<int32_t>(kRounder));
        }
        if constexpr (bits == 4) pack_halves(codes, integers, n);
        if (work.errors == nullptr) continue;
        float *errors = work.errors + first + i;
        DS_IVDEP for (int64_t j = 0; j < n; ++j) errors[j] = buffer[j] - float(integers[j]) * scale;
    }
}

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

constexpr float kMostFloat = 448.0f;

// e4m3 without infinities: magnitudes up to 448 in four bits of exponent and three of mantissa. Those below 2^-6 are
// multiples of 2^-9, the unit in the last place of 2^14.
DS_INLINE uint8_t round_float8(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu, magic = 141u << 23;
    const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + std::bit_cast<float>(magic)) - magic;
    const uint32_t normal = (magnitude - (120u << 23) + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
    uint32_t code = magnitude < (121u << 23) ? small : normal;
    code = magnitude > 0x7f800000u ? 0x7fu : code;
    return uint8_t(code | (bits >> 24 & 0x80u));
}

DS_INLINE float widen_float8(uint8_t x) {
    const uint32_t magnitude = x & 0x7fu, magic = 141u << 23;
    const float small = std::bit_cast<float>(magnitude + magic) - std::bit_cast<float>(magic);
    uint32_t bits = (magnitude << 20) + (120u << 23);
    bits = magnitude < 8 ? std::bit_cast<uint32_t>(small) : bits;
    bits = magnitude == 0x7fu ? 0x7fc00000u : bits;
    return std::bit_cast<float>(bits | uint32_t(x & 0x80u) << 24);
}

DS_INLINE void encode_floats(const Work &work, const Block &block) {
    alignas(64) float buffer[kBlock];
    const int64_t first = block.row * work.packets->numel + block.begin;
    const float scale = write_scale(work, block, kMostFloat, buffer), divisor = scale > 0 ? scale : 1.0f;
    for (int64_t i = 0; i < block.numel; i += kFetch) {
        const int64_t n = block.numel - i < kFetch ? block.numel - i : kFetch;
        fetch_next(work, first + i, n);
        const float *x = wanted(work, first + i, n, buffer);
        uint8_t *codes = codes_of(work, block.row, block.begin + i);
        DS_IVDEP for (int64_t j = 0; j < n; ++j) {
            float q = x[j] / divisor;
            q = q > kMostFloat ? kMostFloat : q;
            q = q < -kMostFloat ? -kMostFloat : q;
            codes[j] = round_float8(q);
        }
        if (work.errors == nullptr) continue;
        float *errors = work.errors + first + i;
        DS_IVDEP for (int64_t j = 0; j < n; ++j) errors[j] = buffer[j] - widen_float8(codes[j]) * scale;
    }
}

DS_INLINE void unpack_floats(float *values, const uint8_t *codes, float scale, int64_t n) {
    DS_IVDEP for (int64_t i = 0; i < n; ++i) values[i] = widen_float8(codes[i]) * scale;
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

DS_INLINE void encode_run_body(const Work &work, int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
        const Block block = block_of(work, unit);
        switch (work.packets->codes) {
            case DS_SIGNS: encode_signs(work, block); break;
            case DS_INTEGERS4: encode_integers<4>(work, block); break;
            case DS_FLOATS8: encode_floats(work, block); break;
            default: encode_integers<8>(work, block); break;
        }
    }
}

DS_INLINE void decode_run_body(const Work &work, int64_t begin, int64_t end) {
    alignas(64) float total[kBlock], buffer[kBlock];
    for (int64_t unit = begin; unit < end; ++unit) {
        Block block = block_of(work, unit);
        const int64_t first = block.row * work.packets->numel + block.begin;
        for (int64_t i = 0; i < block.numel; i += kBlock) {
            const int64_t n = block.numel - i < kBlock ? block.numel - i : kBlock;
            void *target = ds::at(work.values, first + i, work.dtype);
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

DS_KERNEL(encode_run, (const Work &work, int64_t begin, int64_t end), (work, begin, end))
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
