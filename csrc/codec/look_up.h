// Small floats and bfloat16, one from the other by tables that registers of 512 bits hold: a few instructions look up 32
// numbers. The tables belong to a group, as its scale does.
//
// Not parts of a kernel's body: instructions like these are chosen where a function is compiled, not where it is inlined.
// (Masks of ones are for GCC 12, which warns of what these instructions do not use.)
//
// [Note: codes by look-up] A format has kSteps codes in a binade, so that bits of bfloat16, shifted, count codes, but for
// the scale: divided by it, steps are elsewhere. The least number of each code is computed. Wherever at most one of these is
// in a bucket of numbers with the same upper bits, (bits + offset of the bucket) >> shift is the code: the offset of a bucket
// with the least number of code k makes that number k << shift, that of another makes its first number the bucket's code.
//   Steps of a binade are those of every other, and at least 4 numbers apart, so that 32 offsets, by the upper bits of the
// mantissa, do for all binades of normal codes. Numbers of subnormal codes are few where a format has many binades.
//   E3M2 has few binades, and hence many such numbers. Its buckets are quarters of a binade, counted from one in which no
// number has a code but 0: 13 for subnormal codes, 28 for the others. A bucket of those has one step, and no other, as they
// begin 11 numbers later than codes divided by the scale would if a logarithm were a straight line: steps are then in the
// middle of their bucket, 14 numbers up or down.
#pragma once

#include "divisor.h"
#include "small_floats.h"

#if defined(__GNUC__) && defined(__x86_64__)
#include <immintrin.h>
#define DS_LOOK_UP __attribute__((target("arch=x86-64-v4,prefer-vector-width=512")))
#endif

namespace ds {

constexpr int64_t kLeastLookups = 256;  // in a group; for fewer a table does not pay
constexpr int64_t kLookedUp = 64;       // numbers that are encoded together

#if defined(DS_LOOK_UP)

// ---- tables of a group ----------------------------------------------------------------------------------------------

template <class F>
constexpr int kSteps = 1 << F::mantissa;
template <class F>
constexpr int kWidth = 7 - F::mantissa;  // of a step, in bits of bfloat16 that do not count
template <class F>
constexpr bool kFewBinades = F::bits == 6;

DS_LOOK_UP inline __m512i every16(uint32_t x) { return _mm512_set1_epi16(short(x)); }
DS_LOOK_UP inline __m512i up_to_31() {
    alignas(64) static constexpr uint16_t each[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                                      16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
    return _mm512_load_si512(each);
}

// Bits of the least bfloat16 of each of the 16 codes that follow `code`, which stands for `number`, at steps of `step`. What
// lies between two codes is rounded to the even one.
template <class F>
DS_LOOK_UP inline __m512i least_of_codes(uint32_t code, float number, float step, const Divisor &scale) {
    alignas(64) uint32_t least[16];
    DS_IVDEP for (uint32_t j = 0; j < 16; ++j) {
        const float between = number + (float(int32_t(j)) + 0.5f) * step;
        const float needed = std::bit_cast<float>(std::bit_cast<uint32_t>(between) + ((code + 1 + j) & 1));
        const uint32_t near = round_bfloat16(between * scale.by);
        least[j] = near + (quotient<true>(widen_bfloat16(uint16_t(near)), scale) < needed);
    }
    return _mm512_load_si512(least);
}

// Offsets of 32 buckets that begin at `starts`, by the least numbers of `count` codes that follow `before`.
template <class F>
DS_LOOK_UP inline __m512i offsets_of(__m512i starts, uint32_t width, __m512i least, int count, uint32_t before) {
    const __m512i ends = _mm512_add_epi16(starts, every16(width)), one = every16(1);
    __m512i codes = every16(before), from = starts;
    alignas(64) int32_t twice[16];
    _mm512_store_si512(twice, _mm512_mullo_epi32(least, _mm512_set1_epi32(0x10001)));
    for (int k = 0; k < count; ++k) {
        const __m512i number = _mm512_set1_epi32(twice[k]);
        const __mmask32 begun = _mm512_cmplt_epu16_mask(number, ends);
        codes = _mm512_mask_add_epi16(codes, begun, codes, one);
        from = _mm512_mask_max_epu16(from, begun, from, number);
    }
    return _mm512_sub_epi16(_mm512_slli_epi16(codes, kWidth<F>), from);
}

// Of formats with many binades: by the five highest bits of the mantissa.
template <class F>
struct Binades {
    __m512i offsets, least;  // below `least` numbers or codes may be subnormal

    Binades() = default;
    DS_LOOK_UP inline explicit Binades(const Divisor &scale) {
        constexpr uint32_t steps = kSteps<F>, code = steps * F::bias;  // of 1
        const uint32_t binade = (std::bit_cast<uint32_t>(scale.by) >> 16) & 0x7f80u;
        __m512i numbers = least_of_codes<F>(code, 1.0f, 1.0f / steps, scale);
        // steps in the next binade are in this one as well, of fewer codes
        const __m512i next = _mm512_set1_epi32(int32_t(binade + 0x80));
        const __mmask16 further = _mm512_cmpge_epu32_mask(numbers, next) & ((1u << steps) - 1);
        numbers = _mm512_mask_sub_epi32(numbers, further, numbers, _mm512_set1_epi32(0x80));
        const __m512i starts = _mm512_add_epi16(every16(binade), _mm512_slli_epi16(up_to_31(), 2));
        offsets = offsets_of<F>(starts, 4, numbers, steps, code - uint32_t(std::popcount(uint32_t(further))));
        constexpr uint32_t down = (F::bias - 2) << 7;  // all numbers from the second binade of normal codes on
        least = every16(binade > down + 0x80 ? binade - down : 0x80);
    }

    // Codes without signs. `low`: numbers whose codes are of no use.
    DS_LOOK_UP inline __m512i codes(__m512i x, __mmask32 &low) const {
        const __m512i found = _mm512_permutexvar_epi16(_mm512_srli_epi16(x, 2), offsets);
        const __m512i magnitude = _mm512_and_si512(x, every16(0x7fff));
        const __mmask32 numbers = _mm512_test_epi16_mask(magnitude, magnitude);
        low = _mm512_mask_cmplt_epu16_mask(numbers, magnitude, least);
        return _mm512_maskz_srli_epi16(numbers, _mm512_add_epi16(magnitude, found), kWidth<F>);
    }
};

// Of E3M2: by quarters of binades.
template <class F>
struct Quarters {
    __m512i offsets[2], base;

    Quarters() = default;
    DS_LOOK_UP inline explicit Quarters(const Divisor &scale) {
        constexpr uint32_t steps = kSteps<F>, lower = 9;  // buckets below that of code 0, if it had a logarithm
        const uint32_t begin = (std::bit_cast<uint32_t>(scale.by) >> 16) + 11 - ((127 - F::rebias) << 7) - lower * 32;
        constexpr float step = std::bit_cast<float>((F::rebias + 1 - F::mantissa) << 23);
        const __m512i numbers =
            _mm512_sub_epi32(least_of_codes<F>(0, 0.0f, step, scale), _mm512_set1_epi32(int32_t(begin)));
        const __m512i subnormal = offsets_of<F>(_mm512_slli_epi16(up_to_31(), 5), 32, numbers, steps, 0);
        // bucket lower + k - 1 has the least number of code k
        const __m512i codes = _mm512_setr_epi32(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16);
        const __m512i each = _mm512_sub_epi32(_mm512_slli_epi16(codes, 5), numbers);
        const __m512i code = _mm512_and_si512(_mm512_sub_epi16(up_to_31(), every16(lower + steps)), every16(steps - 1));
        const __m512i place = _mm512_slli_epi16(_mm512_add_epi16(code, every16(steps)), 1);
        offsets[1] = _mm512_permutexvar_epi16(place, each);
        offsets[0] = _mm512_mask_mov_epi16(offsets[1], (1u << (lower + steps)) - 1, subnormal);
        base = every16(begin);
    }

    DS_LOOK_UP inline __m512i codes(__m512i x, __mmask32 &low) const {
        low = 0;
        const __m512i place = _mm512_subs_epu16(_mm512_and_si512(x, every16(0x7fff)), base);
        const __m512i found = _mm512_permutex2var_epi16(offsets[0], _mm512_srli_epi16(place, 5), offsets[1]);
        return _mm512_srli_epi16(_mm512_add_epi16(place, found), 5);
    }
};

// ---- bfloat16 to codes ----------------------------------------------------------------------------------------------

// Three bytes of each four, to consecutive memory.
DS_LOOK_UP inline void store_threes(uint8_t *to, __m512i x) {
    const __m512i join = _mm512_set4_epi32(0x0f0b0703, 0x0e0d0c0a, 0x09080605, 0x04020100);  // bytes of 16
    const __m512i close = _mm512_setr_epi32(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 3, 7, 11, 15);
    const __m512i closed = _mm512_maskz_permutexvar_epi32(0xffff, close, _mm512_shuffle_epi8(x, join));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm512_maskz_extracti64x4_epi64(0xf, closed, 0));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to + 32), _mm512_maskz_extracti32x4_epi32(0xf, closed, 2));
}

// 64 codes, in words of 16 bits.
template <class F>
DS_LOOK_UP inline void pack_words(uint8_t *to, __m512i a, __m512i b) {
    const __m512i pairs = _mm512_set1_epi32(1 | 4096 << 16);
    if constexpr (F::bits == 12) {
        store_threes(to, _mm512_madd_epi16(a, pairs));
        store_threes(to + 48, _mm512_madd_epi16(b, pairs));
    } else {
        const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
        const __m512i bytes = _mm512_maskz_permutexvar_epi64(0xff, order, _mm512_packus_epi16(a, b));
        if constexpr (F::bits == 8)
            _mm512_storeu_si512(to, bytes);
        else
            store_threes(to, _mm512_madd_epi16(_mm512_maddubs_epi16(bytes, _mm512_set1_epi16(1 | 64 << 8)), pairs));
    }
}

template <class F>
using CodeTable = std::conditional_t<kFewBinades<F>, Quarters<F>, Binades<F>>;

template <class F>
DS_LOOK_UP __attribute__((noinline)) void make_table(CodeTable<F> &table, const Divisor &scale) {
    table = CodeTable<F>(scale);
}

// Runs of 64 numbers to packed codes, while those `ahead` are asked of the memory, as long as there are some and none has to
// be divided. Returns how many numbers that were.
template <class F>
DS_LOOK_UP __attribute__((noinline)) int64_t look_up_codes(uint8_t *to, const uint16_t *x, int64_t n, int64_t ahead,
                                                           const CodeTable<F> &known) {
    const CodeTable<F> table = known;
    const __m512i magnitude = every16(F::sign - 1);
    int64_t done = 0;
    for (; done + kLookedUp <= n; done += kLookedUp, to += kLookedUp * F::bits / 8) {
        __m512i codes[2];
        __mmask32 low[2];
        ask_for(x + done + ahead, 128);
        DS_UNROLL for (int i = 0; i < 2; ++i) {
            const __m512i some = _mm512_loadu_si512(x + done + 32 * i);
            const __m512i signs = _mm512_srli_epi16(some, 16 - F::bits);
            codes[i] = _mm512_ternarylogic_epi32(table.codes(some, low[i]), signs, magnitude, 0xe4);  // bits of either
        }
        if (low[0] | low[1]) break;
        pack_words<F>(to, codes[0], codes[1]);
    }
    return done;
}

// ---- codes of at most 8 bits to bfloat16 ----------------------------------------------------------------------------

// `table`: the numbers of magnitudes. Whole lines go past the cache with `stream`. Returns how many were looked up.
template <class F>
DS_LOOK_UP __attribute__((noinline)) int64_t look_up_numbers(uint16_t *to, const uint8_t *codes, int64_t n,
                                                             const uint16_t *table, bool stream) {
    constexpr int64_t lanes = 32;
    __m512i parts[F::sign / lanes];
    std::memcpy(parts, table, sizeof parts);
    stream = stream && reinterpret_cast<uintptr_t>(to) % 64 == 0;
    int64_t done = 0;
    for (; done + lanes <= n; done += lanes) {
        const __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(codes + done)));
        __m512i found;
        if constexpr (F::bits == 8) {
            const __mmask32 upper = _mm512_test_epi16_mask(code, _mm512_set1_epi16(64));
            const __m512i low = _mm512_permutex2var_epi16(parts[0], code, parts[1]);
            found = _mm512_mask_mov_epi16(low, upper, _mm512_permutex2var_epi16(parts[2], code, parts[3]));
        } else {
            found = _mm512_permutexvar_epi16(code, parts[0]);
        }
        const __mmask32 numbers = _mm512_cmple_epu16_mask(found, _mm512_set1_epi16(0x7f80));  // others have no sign
        const __m512i signs = _mm512_and_si512(_mm512_slli_epi16(code, 16 - F::bits), _mm512_set1_epi16(short(0x8000)));
        found = _mm512_or_si512(found, _mm512_maskz_mov_epi16(numbers, signs));
        if (stream) _mm512_stream_si512(reinterpret_cast<__m512i *>(to + done), found);
        else _mm512_storeu_si512(to + done, found);
    }
    return done;
}

#else
template <class F>
struct CodeTable {};
template <class F>
void make_table(CodeTable<F> &, const Divisor &) {}
template <class F>
int64_t look_up_codes(uint8_t *, const uint16_t *, int64_t, int64_t, const CodeTable<F> &) { return 0; }
template <class F>
int64_t look_up_numbers(uint16_t *, const uint8_t *, int64_t, const uint16_t *, bool) { return 0; }
#endif

}  // namespace ds
