// Vectors of 16 floats, wherever they are: one register of AVX-512, two of AVX2, four of SSE, or an array.
//
// [Note: lanes] Sums are kept in lanes and added up in one fixed order. Registers of any width then do the same additions,
// so that all instruction sets give the same bits.
#pragma once

#include <cmath>

#include "kernel.h"

namespace ds {

constexpr int64_t kLanes = 16;

#if defined(__GNUC__)
using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));
using IntLanes = int32_t __attribute__((vector_size(kLanes * sizeof(int32_t))));
#else
struct Lanes {
    float of[kLanes];
    friend Lanes operator*(float a, const Lanes &b) {
        Lanes c;
        for (int64_t i = 0; i < kLanes; ++i) c.of[i] = a * b.of[i];
        return c;
    }
    friend Lanes operator*(const Lanes &a, const Lanes &b) {
        Lanes c;
        for (int64_t i = 0; i < kLanes; ++i) c.of[i] = a.of[i] * b.of[i];
        return c;
    }
    Lanes &operator+=(const Lanes &b) {
        for (int64_t i = 0; i < kLanes; ++i) of[i] += b.of[i];
        return *this;
    }
};
#endif

// Vectors of N lanes as a register of the set has them (DS_LANES_KERNEL); of one lane plain numbers, where compilers know
// no vectors.
template <int N>
struct VectorTypes;
#if defined(__GNUC__)
// One by one, as GCC ignores a size that depends on a template's argument.
#define DS_VECTOR_TYPES(n)                                                    \
    template <>                                                               \
    struct VectorTypes<n> {                                                   \
        using Floats = float __attribute__((vector_size(n * 4)));             \
        using Words = uint32_t __attribute__((vector_size(n * 4)));           \
        using Ints = int32_t __attribute__((vector_size(n * 4)));             \
        using Halves = uint16_t __attribute__((vector_size(n * 2)));          \
        using Bytes = uint8_t __attribute__((vector_size(n)));                \
    };
DS_VECTOR_TYPES(16)
DS_VECTOR_TYPES(8)
DS_VECTOR_TYPES(4)
#undef DS_VECTOR_TYPES
#endif

template <int N>
struct Vector : VectorTypes<N> {
#if defined(__GNUC__)
    using typename VectorTypes<N>::Floats;
    using typename VectorTypes<N>::Words;
    using typename VectorTypes<N>::Ints;
    using typename VectorTypes<N>::Halves;
    using typename VectorTypes<N>::Bytes;

    // A loop over arrays, which compilers turn into one instruction; of vectors they convert in steps of two.
    template <class Number>
    static DS_INLINE_MEMBER void widen(Words &to, const Number *from) {
        alignas(Words) uint32_t words[N];
        DS_IVDEP for (int i = 0; i < N; ++i) words[i] = from[i];
        std::memcpy(&to, words, sizeof to);
    }
    // The lowest bits.
    template <class Number>
    static DS_INLINE_MEMBER void narrow(Number *to, const Words &from) {
        if constexpr (N == 16) {  // one instruction
            alignas(Words) uint32_t words[N];
            std::memcpy(words, &from, sizeof from);
            DS_IVDEP for (int i = 0; i < N; ++i) to[i] = Number(words[i]);
        } else {
            const Halves halves = __builtin_convertvector(from, Halves);
            if constexpr (sizeof(Number) == 2) {
                std::memcpy(to, &halves, sizeof halves);
            } else {
                const Bytes bytes = __builtin_convertvector(halves, Bytes);
                std::memcpy(to, &bytes, sizeof bytes);
            }
        }
    }
    static DS_INLINE_MEMBER void take_root(Floats &x) {
        Floats root;
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) root[i] = std::sqrt(x[i]);
        x = root;
    }
#endif
};
template <>
struct Vector<1> {
    using Floats = float;
    using Words = uint32_t;
    using Ints = int32_t;
    template <class Number>
    static void widen(Words &to, const Number *from) { to = *from; }
    template <class Number>
    static void narrow(Number *to, const Words &from) { *to = Number(from); }
    static void take_root(Floats &x) { x = std::sqrt(x); }
};

// The sum of 16 numbers, in the order in which lanes are added up everywhere. The numbers are lost.
DS_INLINE float sum_up(float (&numbers)[kLanes]) {
    for (int64_t half = kLanes / 2; half > 0; half /= 2)
        for (int64_t i = 0; i < half; ++i) numbers[i] += numbers[i + half];
    return numbers[0];
}

#if defined(__GNUC__)
// 16 floats in registers of N lanes. A kernel that is made for each set takes these: `Lanes` would be in memory where
// registers are smaller.
template <int N>
struct LanesOf {
    static constexpr int64_t parts = kLanes / N;
    typename Vector<N>::Floats of[parts];

    DS_INLINE_MEMBER void load(const float *from) {
        DS_UNROLL for (int64_t p = 0; p < parts; ++p) std::memcpy(of + p, from + p * N, sizeof of[p]);
    }
    DS_INLINE_MEMBER void store(float *to) const {
        DS_UNROLL for (int64_t p = 0; p < parts; ++p) std::memcpy(to + p * N, of + p, sizeof of[p]);
    }
    DS_INLINE_MEMBER void add(const LanesOf &b) {
        DS_UNROLL for (int64_t p = 0; p < parts; ++p) of[p] += b.of[p];
    }
    DS_INLINE_MEMBER void add_product(float a, const LanesOf &b) {
        DS_UNROLL for (int64_t p = 0; p < parts; ++p) of[p] += a * b.of[p];
    }
    DS_INLINE_MEMBER void add_product(const LanesOf &a, const LanesOf &b) {
        DS_UNROLL for (int64_t p = 0; p < parts; ++p) of[p] += a.of[p] * b.of[p];
    }
    DS_INLINE_MEMBER void multiply(float a) {
        DS_UNROLL for (int64_t p = 0; p < parts; ++p) of[p] = a * of[p];
    }
    DS_INLINE_MEMBER void take_larger(const LanesOf &b) {
        DS_UNROLL for (int64_t p = 0; p < parts; ++p) of[p] = b.of[p] > of[p] ? b.of[p] : of[p];
    }
    DS_INLINE_MEMBER float sum() const {
        float numbers[kLanes];
        store(numbers);
        return sum_up(numbers);
    }
    DS_INLINE_MEMBER float largest() const {
        float numbers[kLanes];
        store(numbers);
        for (int64_t half = kLanes / 2; half > 0; half /= 2)
            for (int64_t i = 0; i < half; ++i) numbers[i] = numbers[i] < numbers[i + half] ? numbers[i + half] : numbers[i];
        return numbers[0];
    }
};
#endif

DS_INLINE void load(Lanes &to, const float *from) { std::memcpy(&to, from, sizeof to); }
DS_INLINE void store(float *to, const Lanes &from) { std::memcpy(to, &from, sizeof from); }

// 16 numbers of bfloat16.
DS_INLINE void load_bfloat16(Lanes &to, const uint16_t *from) {
#if defined(__GNUC__)
    using Halves = uint16_t __attribute__((vector_size(kLanes * sizeof(uint16_t))));
    using Words = uint32_t __attribute__((vector_size(kLanes * sizeof(uint32_t))));
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    const Words words = __builtin_convertvector(halves, Words) << 16;
    std::memcpy(&to, &words, sizeof to);
#else
    for (int64_t i = 0; i < kLanes; ++i) to.of[i] = widen_bfloat16(from[i]);
#endif
}

// Number `index` of each of 16 words, which hold 32 / bits signed integers.
template <int32_t bits>
DS_INLINE void load_integers(Lanes &to, const int32_t *words, int32_t index) {
#if defined(__GNUC__)
    IntLanes given;
    std::memcpy(&given, words, sizeof given);
    to = __builtin_convertvector((given << (32 - bits * (index + 1))) >> (32 - bits), Lanes);
#else
    for (int64_t i = 0; i < kLanes; ++i)
        to.of[i] = float(int32_t(uint32_t(words[i]) << (32 - bits * (index + 1))) >> (32 - bits));
#endif
}

DS_INLINE float sum(const Lanes &lanes) {
    float parts[kLanes];
    store(parts, lanes);
    return sum_up(parts);
}

#if defined(__GNUC__) && defined(__has_builtin)
#define DS_HAS_SHUFFLES __has_builtin(__builtin_shufflevector)
#endif

#if DS_HAS_SHUFFLES
// totals[n] = the sum of the last four numbers that are left of the lanes of vector n.
template <int64_t N>
DS_INLINE void sums_of_fours(const VectorTypes<4>::Floats (&fours)[N], float (&totals)[N]) {
    using Four = VectorTypes<4>::Floats;
    int64_t n = 0;
    DS_UNROLL for (; n + 4 <= N; n += 4) {
        const Four *of = fours + n;
        const Four first = __builtin_shufflevector(of[0], of[1], 0, 1, 4, 5) + __builtin_shufflevector(of[0], of[1], 2, 3, 6, 7);
        const Four second =
            __builtin_shufflevector(of[2], of[3], 0, 1, 4, 5) + __builtin_shufflevector(of[2], of[3], 2, 3, 6, 7);
        const Four sums =
            __builtin_shufflevector(first, second, 0, 2, 4, 6) + __builtin_shufflevector(first, second, 1, 3, 5, 7);
        std::memcpy(totals + n, &sums, sizeof sums);
    }
    DS_UNROLL for (; n < N; ++n) totals[n] = (fours[n][0] + fours[n][2]) + (fours[n][1] + fours[n][3]);
}
#endif

// totals[n] = sum(lanes[n]), with the same additions.
template <int64_t N>
DS_INLINE void sums_of(const Lanes (&lanes)[N], float (&totals)[N]) {
#if DS_HAS_SHUFFLES
    using Eight = VectorTypes<8>::Floats;
    VectorTypes<4>::Floats of[N];
    DS_UNROLL for (int64_t n = 0; n < N; ++n) {
        const Eight eight = __builtin_shufflevector(lanes[n], lanes[n], 0, 1, 2, 3, 4, 5, 6, 7) +
                            __builtin_shufflevector(lanes[n], lanes[n], 8, 9, 10, 11, 12, 13, 14, 15);
        of[n] = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
    }
    sums_of_fours<N>(of, totals);
#else
    for (int64_t n = 0; n < N; ++n) totals[n] = sum(lanes[n]);
#endif
}

// totals[n] = sum(lanes[n]), with the same additions, of 16 vectors beside each other.
DS_INLINE void sums_beside(const Lanes (&lanes)[kLanes], Lanes &totals) {
#if DS_HAS_SHUFFLES
    Lanes quarter[4];
    for (int64_t q = 0; q < 4; ++q) {  // vectors q, q + 4, q + 8 and q + 12: four numbers of each
        Lanes eights[2];
        for (int64_t i = 0; i < 2; ++i) {
            const Lanes &a = lanes[q + 8 * i], &b = lanes[q + 8 * i + 4];
            eights[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                        __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
        }
        const Lanes &a = eights[0], &b = eights[1];
        quarter[q] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                     __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
    Lanes pairs[2];
    for (int64_t i = 0; i < 2; ++i) {
        const Lanes &a = quarter[2 * i], &b = quarter[2 * i + 1];
        pairs[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                   __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    totals = __builtin_shufflevector(pairs[0], pairs[1], 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
             __builtin_shufflevector(pairs[0], pairs[1], 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
    return;
#endif
    float values[kLanes];
    for (int64_t n = 0; n < kLanes; ++n) values[n] = sum(lanes[n]);
    load(totals, values);
}

}  // namespace ds
