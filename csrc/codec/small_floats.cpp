// Floating-point numbers of 4 to 12 bits in groups with a scale each (deepspeed/ops/fp_quantizer).
//
// A group is read from memory once: what finds its scale leaves it in the first-level cache.
#include "small_floats.h"

#include <atomic>

#include "divisor.h"
#include "look_up.h"

namespace {

using ds::E2M1;
using ds::E3M2;
using ds::E4M3;
using ds::E7M4;

constexpr int64_t kPiece = 512;   // elements, of a group, at once
constexpr int64_t kAhead = 2048;  // elements whose memory is asked for before they are looked at

// ---- packing: the first code in the lowest bits ---------------------------------------------------------------------

// 48 bits: eight codes of 6 bits, or four of 12, each in a byte or two of a word, or of many words at once.
template <class Code, class Word>
DS_INLINE void gather(Word &x) {
    if constexpr (sizeof(Code) == 1) x = (x & 0x003f003f003f003full) | ((x & 0x3f003f003f003f00ull) >> 2);
    x = (x & 0x00000fff00000fffull) | ((x & 0x0fff00000fff0000ull) >> 4);
    x = (x & 0x0000000000ffffffull) | ((x & 0x00ffffff00000000ull) >> 8);
}

// The highest 16 bits do not count.
template <class Code, class Word>
DS_INLINE void scatter(Word &x) {
    x = (x & 0x0000000000ffffffull) | ((x & 0x0000ffffff000000ull) << 8);
    x = (x & 0x00000fff00000fffull) | ((x & 0x00fff00000fff000ull) << 4);
    if constexpr (sizeof(Code) == 1) x = (x & 0x003f003f003f003full) | ((x & 0x0fc00fc00fc00fc0ull) << 2);
}

constexpr int64_t kWord = 8, kPacked = 6;  // bytes

// Registers of words, of which 6 bytes of 8 are moved to or from consecutive memory: those of 16 bytes by a shuffle of
// bytes, then these by one of 4-byte units. One register of plain x86 has no such shuffles.
template <int N>
struct Words {
    static constexpr int64_t bytes = 0;
};
#if defined(__GNUC__)
template <>
struct Words<8> {
    static constexpr int64_t bytes = 32;
    using Word = uint64_t __attribute__((vector_size(32)));
    using Units = int32_t __attribute__((vector_size(32)));
    using Bytes = int8_t __attribute__((vector_size(32)));
    static constexpr Units close{0, 1, 2, 4, 5, 6, 3, 7}, open{0, 1, 2, 2, 3, 4, 5, 5};
    static constexpr Bytes join{0, 1, 2, 3, 4,  5,  8,  9,  10, 11, 12, 13, 6,  7,  14, 15,
                                16, 17, 18, 19, 20, 21, 24, 25, 26, 27, 28, 29, 22, 23, 30, 31};
    static constexpr Bytes part{0,  1,  2,  3,  4,  5,  5,  5,  6,  7,  8,  9,  10, 11, 11, 11,
                                16, 17, 18, 19, 20, 21, 21, 21, 22, 23, 24, 25, 26, 27, 27, 27};
};
template <>
struct Words<16> {
    static constexpr int64_t bytes = 64;
    using Word = uint64_t __attribute__((vector_size(64)));
    using Units = int32_t __attribute__((vector_size(64)));
    using Bytes = int8_t __attribute__((vector_size(64)));
    static constexpr Units close{0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 3, 7, 11, 15};
    static constexpr Units open{0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8, 9, 10, 11, 11};
    static constexpr Bytes join{0,  1,  2,  3,  4,  5,  8,  9,  10, 11, 12, 13, 6,  7,  14, 15,
                                16, 17, 18, 19, 20, 21, 24, 25, 26, 27, 28, 29, 22, 23, 30, 31,
                                32, 33, 34, 35, 36, 37, 40, 41, 42, 43, 44, 45, 38, 39, 46, 47,
                                48, 49, 50, 51, 52, 53, 56, 57, 58, 59, 60, 61, 54, 55, 62, 63};
    static constexpr Bytes part{0,  1,  2,  3,  4,  5,  5,  5,  6,  7,  8,  9,  10, 11, 11, 11,
                                16, 17, 18, 19, 20, 21, 21, 21, 22, 23, 24, 25, 26, 27, 27, 27,
                                32, 33, 34, 35, 36, 37, 37, 37, 38, 39, 40, 41, 42, 43, 43, 43,
                                48, 49, 50, 51, 52, 53, 53, 53, 54, 55, 56, 57, 58, 59, 59, 59};
};
#endif

// `words` words of codes, as many as fit registers. Returns how many those were.
template <class Code, int N>
DS_INLINE int64_t pack_registers(uint8_t *to, const uint8_t *codes, int64_t words) {
    int64_t done = 0;
    if constexpr (Words<N>::bytes > 0) {
        using V = Words<N>;
        for (constexpr int64_t step = V::bytes / kWord; done + step <= words; done += step) {
            typename V::Word x;
            std::memcpy(&x, codes + done * kWord, sizeof x);
            gather<Code>(x);
            const typename V::Units close = V::close;
            const typename V::Bytes join = V::join;
            const auto joined = __builtin_shuffle(typename V::Bytes(x), join);
            const auto closed = __builtin_shuffle(typename V::Units(joined), close);
            std::memcpy(to + done * kPacked, &closed, size_t(step * kPacked));
        }
    }
    return done;
}

// The opposite; up to `readable` bytes are read.
template <class Code, int N>
DS_INLINE int64_t unpack_registers(uint8_t *codes, const uint8_t *from, int64_t words, int64_t readable) {
    int64_t done = 0;
    if constexpr (Words<N>::bytes > 0) {
        using V = Words<N>;
        for (constexpr int64_t step = V::bytes / kWord;
             done + step <= words && done * kPacked + V::bytes <= readable; done += step) {
            typename V::Units packed;
            std::memcpy(&packed, from + done * kPacked, sizeof packed);
            const typename V::Units open = V::open;
            const typename V::Bytes part = V::part;
            const auto opened = __builtin_shuffle(packed, open);
            auto x = typename V::Word(__builtin_shuffle(typename V::Bytes(opened), part));
            scatter<Code>(x);
            std::memcpy(codes + done * kWord, &x, sizeof x);
        }
    }
    return done;
}

// `n` codes, a multiple of what a byte or three hold, in whole words of which the last may have unused codes.
template <class F, int N>
DS_INLINE void pack(uint8_t *to, const typename F::Code *codes, int64_t n) {
    using Code = typename F::Code;
    const int64_t bytes = n * F::bits / 8;
    if constexpr (F::bits == 4) {
        DS_IVDEP for (int64_t i = 0; i < bytes; ++i) to[i] = uint8_t(codes[2 * i] | (codes[2 * i + 1] << 4));
    } else {
        const uint8_t *from = reinterpret_cast<const uint8_t *>(codes);
        const int64_t words = (bytes + kPacked - 1) / kPacked;
        for (int64_t i = pack_registers<Code, N>(to, from, bytes / kPacked); i < words; ++i) {
            const int64_t left = bytes - i * kPacked;
            uint64_t word;
            std::memcpy(&word, from + i * kWord, kWord);
            gather<Code>(word);
            std::memcpy(to + i * kPacked, &word, size_t(left < kPacked ? left : kPacked));
        }
    }
}

template <class F, int N>
DS_INLINE void unpack(typename F::Code *codes, const uint8_t *from, int64_t n, int64_t readable) {
    using Code = typename F::Code;
    const int64_t bytes = n * F::bits / 8;
    if constexpr (F::bits == 4) {
        DS_IVDEP for (int64_t i = 0; i < bytes; ++i) {
            codes[2 * i] = from[i] & 15;
            codes[2 * i + 1] = from[i] >> 4;
        }
    } else {
        uint8_t *to = reinterpret_cast<uint8_t *>(codes);
        const int64_t words = (bytes + kPacked - 1) / kPacked;
        for (int64_t i = unpack_registers<Code, N>(to, from, bytes / kPacked, readable); i < words; ++i) {
            const int64_t left = bytes - i * kPacked;
            uint64_t word = 0;
            std::memcpy(&word, from + i * kPacked, size_t(left < kPacked ? left : kPacked));
            scatter<Code>(word);
            std::memcpy(to + i * kWord, &word, kWord);
        }
    }
}

// ---- groups ---------------------------------------------------------------------------------------------------------

struct Work {
    const ds_float_groups *groups;
    void *values;
    int32_t dtype;
    int32_t *infinite;  // set by a group with a number that is none, or is not finite
    bool stream;        // numbers that are looked up go past the cache, see [Note: copies past the cache]
};

DS_INLINE const float *values_of(const Work &work, int64_t index, float *buffer, int64_t n) {
    return ds::widen(ds::at(static_cast<const void *>(work.values), index, work.dtype), work.dtype, buffer, n);
}

// Elements of the group from `first` on: some of the last group's are missing, and count as zeros.
DS_INLINE int64_t present(const ds_float_groups &g, int64_t first, int64_t n) {
    const int64_t left = g.numel - first;
    return left < 0 ? 0 : left < n ? left : n;
}

// Elements between those that are encoded and those asked of the memory: behind what the search for scales has read.
DS_INLINE int64_t ahead_of(const ds_float_groups &g) { return g.group < kAhead ? kAhead : g.group; }

template <class F, bool kFused>
DS_INLINE void encode_all(typename F::Code *codes, const float *x, int64_t n, const ds::Divisor &scale) {
    float rounded;
    DS_IVDEP for (int64_t j = 0; j < n; ++j)
        codes[j] = typename F::Code(ds::round_small<F>(ds::quotient<kFused>(x[j], scale), x[j], rounded));
}

template <class F>
DS_INLINE void write_scale(const Work &work, int64_t group) {
    const ds_float_groups &g = *work.groups;
    const int64_t begin = group * g.group;
    const void *memory = ds::at(static_cast<const void *>(work.values), begin, work.dtype);
    const int32_t largest = ds::largest_bits(0, memory, work.dtype, present(g, begin, g.group));
    if (largest >= 0x7f800000) *work.infinite = 1;
    float scale = std::bit_cast<float>(largest) / F::largest;
    scale = scale < 0x1p-126f ? 0x1p-126f : scale;
    if (largest == 0) scale = 1.0f;
    std::memcpy(g.scales + group * g.scale_stride, &scale, sizeof scale);
}

// Codes of `group`, of at most kPiece elements from `first` on.
template <class F, int N>
DS_INLINE void encode_piece(const Work &work, int64_t group, int64_t first, const ds::Divisor &divisor) {
    const ds_float_groups &g = *work.groups;
    alignas(64) float buffer[kPiece];
    alignas(64) typename F::Code unpacked[kPiece];
    const int64_t begin = group * g.group + first;
    const int64_t whole = g.group - first < kPiece ? g.group - first : kPiece, n = present(g, begin, whole);
    const void *coming = ds::at(static_cast<const void *>(work.values), begin + ahead_of(g), work.dtype);
    ds::ask_for(coming, n * ds::item_size(work.dtype));
    const float *x = n > 0 ? values_of(work, begin, buffer, n) : nullptr;
    uint8_t *packed = g.codes + group * g.stride + first * F::bits / 8;
    typename F::Code *codes = unpacked;
    if constexpr (F::bits == 8) codes = packed;
    if (divisor.usual)
        encode_all<F, ds::kHasFused<N>>(codes, x, n, divisor);
    else
        encode_all<F, false>(codes, x, n, divisor);
    for (int64_t j = n; j < whole; ++j) codes[j] = 0;
    if constexpr (F::bits != 8) pack<F, N>(packed, codes, whole);
}

// From the first numbers on whose codes the table does not have, the group is encoded by pieces: others may follow.
template <class F, int N>
DS_INLINE void look_up_group(const Work &work, int64_t group, const ds::Divisor &divisor) {
    const ds_float_groups &g = *work.groups;
    const int64_t begin = group * g.group;
    const uint16_t *x = static_cast<const uint16_t *>(work.values) + begin;
    ds::CodeTable<F> table;
    ds::make_table<F>(table, divisor);
    uint8_t *codes = g.codes + group * g.stride;
    int64_t i = ds::look_up_codes<F>(codes, x, present(g, begin, g.group), ahead_of(g), table);
    for (; i < g.group; i += kPiece) encode_piece<F, N>(work, group, i, divisor);
}

template <class F, int N>
DS_INLINE void encode_group(const Work &work, int64_t group) {
    const ds_float_groups &g = *work.groups;
    float scale;
    std::memcpy(&scale, g.scales + group * g.scale_stride, sizeof scale);
    const ds::Divisor divisor = ds::divisor_of(scale);
    if constexpr (N == 16 && F::bits != 4) {
        const bool has_table = divisor.usual && g.group >= ds::kLeastLookups;
        if (work.dtype == DS_BFLOAT16 && has_table) return look_up_group<F, N>(work, group, divisor);
    }
    for (int64_t i = 0; i < g.group; i += kPiece) encode_piece<F, N>(work, group, i, divisor);
}

// The scales of a few groups first: none waits for its own.
template <class F, int N>
DS_INLINE void encode_all_groups(const Work &work, int64_t begin, int64_t end) {
    const int64_t size = work.groups->group, several = size < kAhead ? kAhead / size : 1;
    for (int64_t first = begin; first < end; first += several) {
        const int64_t last = first + several < end ? first + several : end;
        for (int64_t group = first; group < last; ++group) write_scale<F>(work, group);
        for (int64_t group = first; group < last; ++group) encode_group<F, N>(work, group);
    }
}

template <class F, int N>
DS_INLINE void decode_group(const Work &work, int64_t group) {
    const ds_float_groups &g = *work.groups;
    const int64_t begin = group * g.group;
    alignas(64) float buffer[kPiece];
    alignas(64) typename F::Code unpacked[kPiece];
    float scale;
    std::memcpy(&scale, g.scales + group * g.scale_stride, sizeof scale);
    constexpr bool kTable = N == 16 && (F::bits == 6 || F::bits == 8);
    const bool looks_up = kTable && work.dtype == DS_BFLOAT16 && g.group >= ds::kLeastLookups;
    alignas(64) uint16_t table[128];  // of the group's magnitudes
    if constexpr (kTable) {
        if (looks_up) {
            for (uint32_t j = 0; j < F::sign; ++j) unpacked[j] = typename F::Code(j);
            DS_IVDEP for (uint32_t j = 0; j < F::sign; ++j) buffer[j] = ds::widen_small<F>(unpacked[j]) * scale;
            ds::narrow(table, DS_BFLOAT16, buffer, F::sign);
        }
    }
    const uint8_t *end = g.codes + (g.numel - 1) / g.group * g.stride + g.group * F::bits / 8;  // of what may be read
    for (int64_t i = 0; i < g.group; i += kPiece) {
        const int64_t whole = g.group - i < kPiece ? g.group - i : kPiece, n = present(g, begin + i, whole);
        if (n == 0) break;
        const uint8_t *packed = g.codes + group * g.stride + i * F::bits / 8;
        const typename F::Code *codes = unpacked;
        if constexpr (F::bits == 8)
            codes = packed;
        else
            unpack<F, N>(unpacked, packed, whole, end - packed);
        void *target = ds::at(work.values, begin + i, work.dtype);
        int64_t done = 0;
        if constexpr (kTable) {
            uint16_t *numbers = static_cast<uint16_t *>(target);
            if (looks_up) done = ds::look_up_numbers<F>(numbers, codes, n, table, work.stream);
        }
        target = ds::at(target, done, work.dtype);
        float *values = work.dtype == DS_FLOAT32 ? static_cast<float *>(target) : buffer;
        DS_IVDEP for (int64_t j = 0; j < n - done; ++j) values[j] = ds::widen_small<F>(codes[done + j]) * scale;
        ds::narrow(target, work.dtype, values, n - done);
    }
}

template <class F, int N>
DS_INLINE void decode_all_groups(const Work &work, int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) decode_group<F, N>(work, group);
    ds::end_copies(work.stream);
}

template <int N>
DS_INLINE void encode_groups_body(const Work &work, int64_t begin, int64_t end) {
    switch (work.groups->bits) {
        case 4: return encode_all_groups<E2M1, N>(work, begin, end);
        case 6: return encode_all_groups<E3M2, N>(work, begin, end);
        case 8: return encode_all_groups<E4M3, N>(work, begin, end);
        default: return encode_all_groups<E7M4, N>(work, begin, end);
    }
}

template <int N>
DS_INLINE void decode_groups_body(const Work &work, int64_t begin, int64_t end) {
    switch (work.groups->bits) {
        case 4: return decode_all_groups<E2M1, N>(work, begin, end);
        case 6: return decode_all_groups<E3M2, N>(work, begin, end);
        case 8: return decode_all_groups<E4M3, N>(work, begin, end);
        default: return decode_all_groups<E7M4, N>(work, begin, end);
    }
}

DS_LANES_KERNEL(encode_groups, (const Work &work, int64_t begin, int64_t end), (work, begin, end))
DS_LANES_KERNEL(decode_groups, (const Work &work, int64_t begin, int64_t end), (work, begin, end))

template <class Run>
void for_each_group(const ds_float_groups &g, int32_t threads, Run &&run) {
    ds::for_each_share((g.numel + g.group - 1) / g.group, g.numel, threads, run);
}

}  // namespace

int32_t ds_encode_floats(const ds_float_groups *groups, const void *values, int32_t dtype, int32_t threads) {
    std::atomic<int32_t> infinite = 0;
    for_each_group(*groups, threads, [&](int64_t begin, int64_t end) {
        int32_t found = 0;
        const Work work{groups, const_cast<void *>(values), dtype, &found, false};
        encode_groups(work, begin, end);
        if (found != 0) infinite = 1;
    });
    return infinite;
}

void ds_decode_floats(const ds_float_groups *groups, void *values, int32_t dtype, int32_t threads) {
    const Work work{groups, values, dtype, nullptr, groups->numel >= ds::kStreamNumel};
    for_each_group(*groups, threads, [&](int64_t begin, int64_t end) { decode_groups(work, begin, end); });
}
