// What every host kernel shares: choice of the instruction set, conversion of 16-bit types, division of work.
//
// [Note: blocks] A kernel walks its tensors in blocks of kBlock elements. 16-bit operands of a block are widened into a
// buffer in the first-level cache, the arithmetic runs on fp32 arrays only, and results are rounded back from there. So
// there is one arithmetic loop per optimizer instead of one per combination of types, and the low-precision copy of the
// parameter is made while its block is still in the cache: one pass over memory.
//
// [Note: copies past the cache] The low-precision copy is only written. A plain store reads its line from memory first,
// two bytes per parameter more than needed, so copies of tensors that no cache holds are written around it, in pieces
// short enough that the loads of the other operands never wait for the write buffers (128 elements: 14 % faster than
// plain stores of whole blocks, 1024: 4 %).
//
// [Note: equal bits] The body of a kernel is one always_inline function that is compiled three times, inside wrappers
// with different target attributes. All its operations are correctly rounded by IEEE 754 (add, multiply, divide, square
// root, conversions done in integers), elements do not interact, and contraction to fused multiply-adds is switched off
// for the whole library, so all three give the same bits, in vector lanes as in loop remainders.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "deepspeed_host.h"

#if defined(__GNUC__)
#define DS_INLINE static inline __attribute__((always_inline))
#define DS_INLINE_MEMBER inline __attribute__((always_inline))
#define DS_APART __attribute__((noinline))
#define DS_IVDEP _Pragma("GCC ivdep")
#define DS_UNROLL _Pragma("GCC unroll 16") // whole, so that arrays of vectors are registers
#else
#define DS_INLINE static inline
#define DS_INLINE_MEMBER inline
#define DS_APART
#define DS_IVDEP
#define DS_UNROLL
#endif

// DS_KERNEL(name, (parameters), (arguments)) makes `name`, which runs `name_body` as compiled for the set in use.
// DS_LANES_KERNEL: `name_body` is a template, of the number of fp32 lanes that a register of the set has.
// DS_LANES_APART(name, (template parameters), (template arguments), (parameters), (arguments)) makes a function `name`, a
// template of that number of lanes and of more, of `name_body`. It is compiled apart for each set and not into the kernel
// that calls it: compilers take more than twice as long for a function of twice the size.
#if defined(__GNUC__) && defined(__x86_64__)
#define DS_AVX512 __attribute__((target("arch=x86-64-v4,prefer-vector-width=512")))
#define DS_AVX2 __attribute__((target("arch=x86-64-v3")))
#define DS_KERNEL_OF(name, parameters, arguments, widest, wide, plain)                                                 \
    DS_AVX512 static void name##_avx512 parameters { widest arguments; }                                               \
    DS_AVX2 static void name##_avx2 parameters { wide arguments; }                                                     \
    static void name##_plain parameters { plain arguments; }                                                           \
    static void name parameters {                                                                                      \
        switch (ds_isa()) {                                                                                            \
            case 2: return name##_avx512 arguments;                                                                    \
            case 1: return name##_avx2 arguments;                                                                      \
            default: return name##_plain arguments;                                                                    \
        }                                                                                                              \
    }
#else
#define DS_AVX512
#define DS_AVX2
#define DS_KERNEL_OF(name, parameters, arguments, widest, wide, plain) \
    static void name parameters { plain arguments; }
#endif
#define DS_KERNEL(name, parameters, arguments) \
    DS_KERNEL_OF(name, parameters, arguments, name##_body, name##_body, name##_body)
#define DS_LANES_KERNEL(name, parameters, arguments) \
    DS_KERNEL_OF(name, parameters, arguments, name##_body<16>, name##_body<8>, name##_body<ds::kPlainLanes>)
#define DS_LIST(...) __VA_OPT__(, ) __VA_ARGS__
#define DS_LANES_APART(name, types, values, parameters, arguments)                                               \
    template <int N DS_LIST types>                                                                               \
    DS_APART DS_AVX512 static void name##_avx512 parameters { name##_body<N DS_LIST values> arguments; }         \
    template <int N DS_LIST types>                                                                               \
    DS_APART DS_AVX2 static void name##_avx2 parameters { name##_body<N DS_LIST values> arguments; }             \
    template <int N DS_LIST types>                                                                               \
    DS_APART static void name##_plain parameters { name##_body<N DS_LIST values> arguments; }                    \
    template <int N DS_LIST types>                                                                               \
    DS_INLINE void name parameters {                                                                             \
        if constexpr (N == 16)                                                                                   \
            name##_avx512<N DS_LIST values> arguments;                                                           \
        else if constexpr (N == 8)                                                                               \
            name##_avx2<N DS_LIST values> arguments;                                                             \
        else                                                                                                     \
            name##_plain<N DS_LIST values> arguments;                                                            \
    }

namespace ds {

#if defined(__GNUC__)
constexpr int kPlainLanes = 4;
#else
constexpr int kPlainLanes = 1;
#endif
constexpr int64_t kBlock = 1024;               // elements; 4 KiB per fp32 operand
constexpr int64_t kParallelNumel = 64 * 1024;  // below this, waking threads costs more than it saves

// ---- magnitudes ----------------------------------------------------------------------------------------------------

// The bits of the largest magnitude: those of a NaN if there is one, as they are larger than those of infinity.
DS_INLINE int32_t largest_bits(int32_t largest, const float *x, int64_t n) {
    int32_t result = largest;
    for (int64_t i = 0; i < n; ++i) {
        const int32_t bits = std::bit_cast<int32_t>(x[i]) & 0x7fffffff;
        result = bits > result ? bits : result;
    }
    return result;
}

// ---- 16-bit types ---------------------------------------------------------------------------------------------------

DS_INLINE float widen_bfloat16(uint16_t x) { return std::bit_cast<float>(uint32_t(x) << 16); }

DS_INLINE uint16_t round_bfloat16(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return uint16_t(is_nan ? 0x7fc0u : rounded);
}

// Rebias the exponent; a subnormal half is normalised by one exact fp32 subtraction.
DS_INLINE float widen_float16(uint16_t x) {
    const uint32_t magnitude = uint32_t(x & 0x7fffu) << 13;
    const uint32_t exponent = magnitude & (0x7c00u << 13);
    const uint32_t normal = magnitude + (112u << 23);
    const uint32_t special = magnitude + (224u << 23);  // infinity and NaN
    const float subnormal = std::bit_cast<float>(magnitude + (113u << 23)) - std::bit_cast<float>(113u << 23);
    uint32_t bits = exponent == (0x7c00u << 13) ? special : normal;
    bits = exponent == 0 ? std::bit_cast<uint32_t>(subnormal) : bits;
    return std::bit_cast<float>(bits | (uint32_t(x & 0x8000u) << 16));
}

// Three ranges: subnormal results are rounded by one fp32 addition whose unit in the last place is 2^-24, normal ones
// by an integer addition that carries into the exponent, the rest is infinity or NaN.
DS_INLINE uint16_t round_float16(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t magic = 126u << 23;  // 0.5
    const uint32_t subnormal =
        std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + std::bit_cast<float>(magic)) - magic;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    uint32_t half = magnitude < (113u << 23) ? subnormal : normal;
    half = magnitude >= (143u << 23) ? special : half;
    return uint16_t(half | sign);
}

DS_INLINE int64_t item_size(int32_t dtype) { return dtype == DS_FLOAT32 ? 4 : 2; }

template <class T>
DS_INLINE T *at(T *base, int64_t index, int32_t dtype) {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    return reinterpret_cast<Byte *>(base) + index * item_size(dtype);
}

// n elements of `source` as fp32: the memory itself where it is fp32, else widened into `buffer`.
DS_INLINE const float *widen(const void *source, int32_t dtype, float *__restrict buffer, int64_t n) {
    if (dtype == DS_FLOAT32) return static_cast<const float *>(source);
    const uint16_t *__restrict from = static_cast<const uint16_t *>(source);
    if (dtype == DS_BFLOAT16) {
        DS_IVDEP for (int64_t i = 0; i < n; ++i) buffer[i] = widen_bfloat16(from[i]);
    } else {
        DS_IVDEP for (int64_t i = 0; i < n; ++i) buffer[i] = widen_float16(from[i]);
    }
    return buffer;
}

// n elements rounded to `dtype`; nothing to do where `source` is the target itself.
DS_INLINE void narrow(void *target, int32_t dtype, const float *__restrict source, int64_t n) {
    if (target == source) return;
    if (dtype == DS_FLOAT32) {
        std::memcpy(target, source, size_t(n) * sizeof(float));
        return;
    }
    uint16_t *__restrict to = static_cast<uint16_t *>(target);
    if (dtype == DS_BFLOAT16) {
        DS_IVDEP for (int64_t i = 0; i < n; ++i) to[i] = round_bfloat16(source[i]);
    } else {
        DS_IVDEP for (int64_t i = 0; i < n; ++i) to[i] = round_float16(source[i]);
    }
}

// The bits of the largest magnitude, as fp32, of n elements of any type.
DS_INLINE int32_t largest_bits(int32_t largest, const void *x, int32_t dtype, int64_t n) {
    if (dtype == DS_FLOAT32) return largest_bits(largest, static_cast<const float *>(x), n);
    const uint16_t *halves = static_cast<const uint16_t *>(x);
    uint16_t most = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint16_t bits = halves[i] & 0x7fff;
        most = bits > most ? bits : most;
    }
    const int32_t bits = std::bit_cast<int32_t>(dtype == DS_BFLOAT16 ? widen_bfloat16(most) : widen_float16(most));
    return bits > largest ? bits : largest;
}

// Lines of memory on their way to the second-level cache, where they drive nothing out of the first: that may be small, and
// what is worked on meanwhile is in it.
DS_INLINE void ask_for(const void *memory, int64_t bytes = 64) {
#if defined(__GNUC__)
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char *>(memory) + i, 0, 2);
#else
    (void)memory, (void)bytes;
#endif
}

// ---- the low-precision copy -----------------------------------------------------------------------------------------

constexpr int64_t kCopyBlock = 128;                 // elements; see [Note: copies past the cache]
constexpr int64_t kStreamNumel = int64_t(4) << 20;  // of one call, from which on what is only written goes past the cache

// Elements that a kernel takes at once.
DS_INLINE int64_t block_numel(const ds_segment &s) { return s.low_precision != nullptr ? kCopyBlock : kBlock; }

DS_INLINE void stream_bytes(void *target, const void *source, int64_t bytes) {
#if defined(__SSE2__)
    char *to = static_cast<char *>(target);
    const char *from = static_cast<const char *>(source);
    int64_t head = -reinterpret_cast<intptr_t>(to) & 15;
    if (head > bytes) head = bytes;
    std::memcpy(to, from, size_t(head));
    int64_t i = head;
    for (; i + 16 <= bytes; i += 16)
        _mm_stream_si128(reinterpret_cast<__m128i *>(to + i),
                         _mm_loadu_si128(reinterpret_cast<const __m128i *>(from + i)));
    std::memcpy(to + i, from + i, size_t(bytes - i));
#else
    std::memcpy(target, source, size_t(bytes));
#endif
}

// Writes elements [index, index + n) of the copy, n <= kCopyBlock; nothing where the segment has none.
DS_INLINE void copy_out(const ds_segment &s, const ds_storage &type, int64_t index, const float *values, int64_t n,
                        bool stream) {
    if (s.low_precision == nullptr) return;
    void *target = at(s.low_precision, index, type.low_precision);
    if (!stream) return narrow(target, type.low_precision, values, n);
    alignas(64) uint16_t buffer[kCopyBlock];
    if (type.low_precision == DS_FLOAT32) return stream_bytes(target, values, n * 4);
    narrow(buffer, type.low_precision, values, n);
    stream_bytes(target, buffer, n * 2);
}

// After the last copy of a run: other threads see the copies before they see that the run is over.
DS_INLINE void end_copies(bool stream) {
#if defined(__SSE2__)
    if (stream) _mm_sfence();
#else
    (void)stream;
#endif
}

// Whether the copies of one call are too many for the caches.
inline bool streams(const ds_segment *segments, int64_t count) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i) total += segments[i].low_precision != nullptr ? segments[i].numel : 0;
    return total >= kStreamNumel;
}

// An operand that is read and written: works in place where it is fp32, else through `buffer`.
struct Operand {
    void *memory;
    int32_t dtype;
    float *values;
};

DS_INLINE Operand open(void *base, int64_t index, int32_t dtype, float *buffer, int64_t n) {
    void *memory = at(base, index, dtype);
    return {memory, dtype, const_cast<float *>(widen(memory, dtype, buffer, n))};
}

DS_INLINE void close(const Operand &operand, int64_t n) { narrow(operand.memory, operand.dtype, operand.values, n); }

// ---- work -----------------------------------------------------------------------------------------------------------

// Calls run(begin, end) for shares of `units`, one for each thread; a single one where they have fewer elements in all
// than kParallelNumel.
template <class Run>
void for_each_share(int64_t units, int64_t numel, int32_t threads, Run &&run) {
    if (threads <= 1 || numel < kParallelNumel) return run(0, units);
    if (threads > units) threads = int32_t(units);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int32_t t = 0; t < threads; ++t) run(units * t / threads, units * (t + 1) / threads);
}

constexpr int64_t block_count(int64_t numel) { return (numel + kBlock - 1) / kBlock; }

// Calls work(item, begin, end) so that every element of every item is covered once. Calls are for runs of whole blocks
// (the last block of an item may be short); a thread's share is one run of blocks through the list of items.
template <class Numel, class Work>
void for_each_run(int64_t count, int32_t threads, Numel &&numel_of, Work &&work) {
    int64_t total = 0, blocks = 0;
    for (int64_t i = 0; i < count; ++i) {
        total += numel_of(i);
        blocks += block_count(numel_of(i));
    }
    for_each_share(blocks, total, threads, [&](int64_t first, int64_t last) {
        int64_t seen = 0;
        for (int64_t i = 0; i < count && seen < last; ++i) {
            const int64_t numel = numel_of(i), here = block_count(numel);
            const int64_t from = first > seen ? first - seen : 0, to = last - seen < here ? last - seen : here;
            if (from < to) work(i, from * kBlock, to * kBlock < numel ? to * kBlock : numel);
            seen += here;
        }
    });
}

}  // namespace ds
