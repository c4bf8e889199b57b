// What stands for the elements of a block in a payload: signs, integers of 8 or 4 bits, 8-bit floats.
//
// A form has
//   bits          of a code
//   random        whether it depends on a key besides
//   padding       a number whose bits are zeros
//   Scan<N>       what the scale is made of: take(sums of kPiece numbers and errors), then scale(elements)
//   encode(...)   the code of a number, and what the code stands for
//   decode(...)   n numbers of codes
// Numbers are encoded kPiece at a time, so that compilers know how many there are.
#pragma once

#include "divisor.h"
#include "lanes.h"
#include "mixing.h"
#include "small_floats.h"

#if defined(__GNUC__) && defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ds {

constexpr int64_t kPiece = 64;
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds a small number to an integer, to nearest even
constexpr int64_t kSumLanes = 32;

// ---- signs ----------------------------------------------------------------------------------------------------------

#if defined(__GNUC__)
using FourFloats = float __attribute__((vector_size(16)));
using FourBits = uint32_t __attribute__((vector_size(16)));
using FourDoubles = double __attribute__((vector_size(32)));
#endif

// With registers of 512 bits, of which compilers make parts where vectors are converted or become bits. Not parts of a
// kernel's body: such instructions are chosen where a function is compiled, not where it is inlined.
#if defined(__GNUC__) && defined(__x86_64__)
#define DS_WIDE_SIGNS __attribute__((target("arch=x86-64-v4,prefer-vector-width=512"), noinline))
template <bool kErrors>
DS_WIDE_SIGNS void add_magnitudes_wide(double (&lane)[kSumLanes], const float *x, const float *errors) {
    constexpr int64_t width = 8, several = kSumLanes / width;
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m512d sums[several];
    std::memcpy(sums, lane, sizeof sums);
    DS_UNROLL for (int64_t i = 0; i < kPiece; i += width) {
        __m256 wanted = _mm256_loadu_ps(x + i);
        if constexpr (kErrors) wanted = _mm256_add_ps(wanted, _mm256_loadu_ps(errors + i));
        const __m512d wide = _mm512_maskz_cvtps_pd(0xff, _mm256_and_ps(wanted, magnitude));
        sums[i / width % several] = _mm512_add_pd(sums[i / width % several], wide);
    }
    std::memcpy(lane, sums, sizeof sums);
}

template <bool kErrors>
DS_WIDE_SIGNS void encode_signs_wide(uint8_t *codes, const float *x, float *errors, float scale) {
    const __m512 up = _mm512_set1_ps(scale), down = _mm512_set1_ps(-scale);
    DS_UNROLL for (int64_t i = 0; i < kPiece; i += 16) {
        __m512 wanted = _mm512_loadu_ps(x + i);
        if constexpr (kErrors) wanted = _mm512_add_ps(wanted, _mm512_loadu_ps(errors + i));
        const __mmask16 bits = _mm512_cmp_ps_mask(wanted, _mm512_setzero_ps(), _CMP_GE_OQ);
        std::memcpy(codes + i / 8, &bits, sizeof bits);
        if constexpr (kErrors) _mm512_storeu_ps(errors + i, _mm512_sub_ps(wanted, _mm512_mask_blend_ps(bits, down, up)));
    }
}
#endif

// Magnitudes are summed in lanes, see [Note: lanes], of which the last halves are added to the first.
template <int N, bool kErrors>
DS_INLINE void add_magnitudes(double (&lane)[kSumLanes], const float *x, const float *errors) {
#if defined(__GNUC__)  // vectors that every set has or has halves of, so that sums stay in registers
#if defined(__x86_64__)
    if constexpr (N == 16) return add_magnitudes_wide<kErrors>(lane, x, errors);
#endif
    constexpr int64_t width = 4, several = kSumLanes / width;
    FourDoubles sums[several];
    std::memcpy(sums, lane, sizeof sums);
#pragma GCC unroll 16
    for (int64_t i = 0; i < kPiece; i += width) {
        FourFloats wanted, owed;
        std::memcpy(&wanted, x + i, sizeof wanted);
        if constexpr (kErrors) {
            std::memcpy(&owed, errors + i, sizeof owed);
            wanted += owed;
        }
        sums[i / width % several] += __builtin_convertvector(FourFloats(FourBits(wanted) & 0x7fffffffu), FourDoubles);
    }
    std::memcpy(lane, sums, sizeof sums);
#else
    for (int64_t i = 0; i < kPiece; ++i) {
        const float wanted = kErrors ? x[i] + errors[i] : x[i];
        lane[i % kSumLanes] += double(std::bit_cast<float>(std::bit_cast<uint32_t>(wanted) & 0x7fffffffu));
    }
#endif
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

// The mean of the magnitudes is the scale.
struct Signs {
    static constexpr int32_t bits = 1;
    static constexpr bool random = false;
    static constexpr float padding = -1.0f;

    template <int N>
    struct Scan {
        alignas(64) double lane[kSumLanes] = {};

        template <bool kErrors>
        DS_INLINE_MEMBER void take(const float *x, const float *errors) { add_magnitudes<N, kErrors>(lane, x, errors); }
        DS_INLINE_MEMBER float scale(int64_t numel) { return float(fold(lane) / double(numel)); }
    };

    template <int N, bool kErrors>
    static DS_INLINE_MEMBER void encode(uint8_t *codes, const float *x, float *errors, float scale, const Divisor &,
                                        uint32_t) {
#if defined(__GNUC__) && defined(__x86_64__)
        if constexpr (N == 16) return encode_signs_wide<kErrors>(codes, x, errors, scale);
#endif
        alignas(64) float sums[kPiece];
        const float *wanted = x;
        if constexpr (kErrors) {
            DS_IVDEP for (int64_t j = 0; j < kPiece; ++j) sums[j] = x[j] + errors[j];
            wanted = sums;
        }
        for (int64_t i = 0; i < kPiece; i += 16) {
            const uint16_t word = uint16_t(bits_of_signs(wanted + i));
            codes[i / 8] = uint8_t(word);
            codes[i / 8 + 1] = uint8_t(word >> 8);
        }
        if constexpr (kErrors) {
            DS_IVDEP for (int64_t j = 0; j < kPiece; ++j) errors[j] = sums[j] - (sums[j] >= 0 ? scale : -scale);
        }
    }

    static DS_INLINE_MEMBER void decode(float *values, const uint8_t *codes, float scale, int64_t n) {
        int64_t i = 0;
        for (; i + 16 <= n; i += 16)
            spread_signs(values + i, uint32_t(codes[i / 8]) | uint32_t(codes[i / 8 + 1]) << 8, scale);
        for (; i < n; ++i) values[i] = (codes[i / 8] >> (i % 8)) & 1 ? scale : -scale;
    }
};

// ---- what a block's largest magnitude scales ------------------------------------------------------------------------

// `kHash`: a sum of all bits as well, which is different for nearly every other block.
template <int N, bool kHash>
struct LargestScan {
    using Floats = typename Vector<N>::Floats;
    using Words = typename Vector<N>::Words;
    using Ints = typename Vector<N>::Ints;
    Ints largest = Ints{};
    Words hash = Words{};

    template <bool kErrors>
    DS_INLINE_MEMBER void take(const float *x, const float *errors) {
        Ints most = largest;
        Words total = hash;
#if defined(__GNUC__)
#pragma GCC unroll 16
#endif
        for (int64_t i = 0; i < kPiece; i += N) {
            Floats wanted, owed;
            std::memcpy(&wanted, x + i, sizeof wanted);
            if constexpr (kErrors) {
                std::memcpy(&owed, errors + i, sizeof owed);
                wanted = wanted + owed;
            }
            const Words word = __builtin_bit_cast(Words, wanted);
            const Ints magnitude = __builtin_bit_cast(Ints, word & 0x7fffffffu);
            most = magnitude > most ? magnitude : most;
            if constexpr (kHash) total = total + word;
        }
        largest = most;
        hash = total;
    }

    DS_INLINE_MEMBER float found() const {
        int32_t each[N], result = 0;
        std::memcpy(each, &largest, sizeof each);
        for (const int32_t bits : each) result = bits > result ? bits : result;
        return std::bit_cast<float>(result);
    }
    DS_INLINE_MEMBER uint32_t sum_of_bits() const {
        uint32_t each[N], result = 0;
        std::memcpy(each, &hash, sizeof each);
        for (const uint32_t bits : each) result += bits;
        return result;
    }
};

// Codes of 4 bits, two in a byte, the first in its lower half.
DS_INLINE void join_halves(uint8_t *codes, const uint8_t *whole) {
    DS_IVDEP for (int64_t i = 0; i < kPiece / 2; ++i) {
        uint16_t pair;
        std::memcpy(&pair, whole + 2 * i, sizeof pair);
        if constexpr (std::endian::native == std::endian::big) pair = uint16_t(pair >> 8 | pair << 8);
        codes[i] = uint8_t((pair & 15) | ((pair >> 4) & 0xf0));
    }
}

// `One::one(x, divisor, number, index, key)` is the code of one number, whose lowest bits count.
template <class One, bool kFused, bool kErrors>
DS_INLINE void encode_each(uint8_t *codes, const float *x, float *errors, float scale, const Divisor &divisor,
                           uint32_t key) {
    alignas(64) uint8_t whole[kPiece];
    uint8_t *target = One::bits == 8 ? codes : whole;
    DS_IVDEP for (int64_t j = 0; j < kPiece; ++j) {
        const float wanted = kErrors ? x[j] + errors[j] : x[j];
        float number;
        target[j] = One::template one<kFused>(wanted, divisor, number, key + uint32_t(j));
        if constexpr (kErrors) errors[j] = wanted - number * scale;
    }
    if constexpr (One::bits == 4) join_halves(codes, whole);
}

template <class One, int N, bool kErrors>
DS_INLINE void encode_scaled(uint8_t *codes, const float *x, float *errors, float scale, const Divisor &divisor,
                             uint32_t key) {
    if (divisor.usual)
        encode_each<One, kHasFused<N>, kErrors>(codes, x, errors, scale, divisor, key);
    else
        encode_each<One, false, kErrors>(codes, x, errors, scale, divisor, key);
}

template <int32_t kBits>
struct Integers {
    static constexpr int32_t bits = kBits;
    static constexpr bool random = false;
    static constexpr float most = float((1 << (bits - 1)) - 1), padding = 0.0f;

    template <int N>
    struct Scan : LargestScan<N, false> {
        DS_INLINE_MEMBER float scale(int64_t) { return this->found() / most; }
    };

    template <bool kFused>
    static DS_INLINE_MEMBER uint8_t one(float x, const Divisor &divisor, float &number, uint32_t) {
        float q = quotient<kFused>(x, divisor);
        if constexpr (!kFused) {
            q = q > most ? most : q;
            q = q < -most ? -most : q;
            q = q == q ? q : 0.0f;  // of a block that is not finite
        }
        const float sum = q + kRounder;
        number = sum - kRounder;
        return uint8_t(std::bit_cast<uint32_t>(sum));
    }

    template <int N, bool kErrors>
    static DS_INLINE_MEMBER void encode(uint8_t *codes, const float *x, float *errors, float scale, const Divisor &divisor,
                                        uint32_t key) {
        encode_scaled<Integers, N, kErrors>(codes, x, errors, scale, divisor, key);
    }

    static DS_INLINE_MEMBER void decode(float *values, const uint8_t *codes, float scale, int64_t n) {
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
};

// Rounded up or down at random, so that the mean is the number itself: a quotient plus one of 2^16 numbers between -1/2 and
// 1/2, evenly spaced, is rounded to nearest. Quotients are divided, as any bit of them may decide.
template <int32_t kBits>
struct RandomIntegers : Integers<kBits> {
    static constexpr bool random = true;
    using Integers<kBits>::most;

    template <int N>
    struct Scan : LargestScan<N, true> {
        DS_INLINE_MEMBER float scale(int64_t) { return this->found() / most; }
    };

    template <bool>
    static DS_INLINE_MEMBER uint8_t one(float x, const Divisor &divisor, float &number, uint32_t index) {
        float q = x / divisor.by;
        q = q > most ? most : q;
        q = q < -most ? -most : q;
        q = q == q ? q : 0.0f;
        const float part = float(int32_t((mix(index) >> 15) | 1u)) * 0x1p-17f - 0.5f;
        const float sum = (q + part) + kRounder;
        number = sum - kRounder;
        return uint8_t(std::bit_cast<uint32_t>(sum));
    }

    template <int N, bool kErrors>
    static DS_INLINE_MEMBER void encode(uint8_t *codes, const float *x, float *errors, float scale, const Divisor &divisor,
                                        uint32_t key) {
        encode_each<RandomIntegers, false, kErrors>(codes, x, errors, scale, divisor, key);
    }
};

// e4m3 without infinities.
struct EightBitFloats {
    static constexpr int32_t bits = 8;
    static constexpr bool random = false;
    static constexpr float most = E4M3::largest, padding = 0.0f;

    template <int N>
    struct Scan : LargestScan<N, false> {
        DS_INLINE_MEMBER float scale(int64_t) { return this->found() / most; }
    };

    template <bool kFused>
    static DS_INLINE_MEMBER uint8_t one(float x, const Divisor &divisor, float &number, uint32_t) {
        float q = quotient<kFused>(x, divisor);
        if constexpr (kFused) return uint8_t(round_small<E4M3>(q, x, number));
        q = q > most ? most : q;
        q = q < -most ? -most : q;
        const uint32_t code = round_small<E4M3>(q, q, number);
        number = q == q ? number : q;
        return uint8_t(q == q ? code : 0x7fu | (code & 0x80u));
    }

    template <int N, bool kErrors>
    static DS_INLINE_MEMBER void encode(uint8_t *codes, const float *x, float *errors, float scale, const Divisor &divisor,
                                        uint32_t key) {
        encode_scaled<EightBitFloats, N, kErrors>(codes, x, errors, scale, divisor, key);
    }

    static DS_INLINE_MEMBER void decode(float *values, const uint8_t *codes, float scale, int64_t n) {
        DS_IVDEP for (int64_t i = 0; i < n; ++i) values[i] = widen_small<E4M3>(codes[i]) * scale;
    }
};

}  // namespace ds
