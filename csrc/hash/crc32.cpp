// CRC-32 (the one of zip and zlib) of the blocks of a run of bytes, by multiplication without carries.
//
// Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel, 2009): a message is a
// polynomial over GF(2), of which the remainder modulo P is wanted. 64 bytes are kept as four 128-bit remainders; each
// is moved 512 bits on by multiplying its halves with x^(512+32) and x^(512-32) mod P, and the next 64 bytes are added.
// In the end the four become one, that one is shortened to 64 bits, and Barrett's reduction gives 32. All bits are in
// reversed order, as the CRC has them, which is why each constant is shifted by one.
#include <array>

#include "deepspeed_host.h"

#if defined(__GNUC__) && defined(__x86_64__)
#include <immintrin.h>

namespace {

constexpr std::array<uint32_t, 256> byte_remainders() {
    std::array<uint32_t, 256> table{};
    for (uint32_t i = 0; i < 256; ++i) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1u) ? 0xedb88320u : 0u);
        table[i] = value;
    }
    return table;
}

constexpr std::array<uint32_t, 256> kRemainders = byte_remainders();

#define DS_CLMUL __attribute__((target("pclmul,sse4.1"), always_inline)) static inline

DS_CLMUL __m128i load(const uint8_t *from) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(from)); }

// `value` moved on by the distance that the two factors stand for, with `next` added.
DS_CLMUL __m128i fold(__m128i value, __m128i factors, __m128i next) {
    const __m128i low = _mm_clmulepi64_si128(value, factors, 0x00), high = _mm_clmulepi64_si128(value, factors, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// `bytes` is a multiple of 16 and at least 64.
__attribute__((target("pclmul,sse4.1"))) uint32_t fold_all(const uint8_t *data, int64_t bytes, uint32_t crc) {
    const __m128i by_512 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);  // x^(512-32), x^(512+32)
    const __m128i by_128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);  // x^(128-32), x^(128+32)
    const __m128i by_64 = _mm_set_epi64x(0, 0x163cd6124);             // x^64
    const __m128i barrett = _mm_set_epi64x(0x1f7011641, 0x1db710641);  // x^64 / P, P
    const __m128i even_words = _mm_setr_epi32(-1, 0, -1, 0);
    __m128i a = _mm_xor_si128(load(data), _mm_cvtsi32_si128(int32_t(crc)));
    __m128i b = load(data + 16), c = load(data + 32), d = load(data + 48);
    int64_t at = 64;
    for (; at + 64 <= bytes; at += 64) {
        a = fold(a, by_512, load(data + at));
        b = fold(b, by_512, load(data + at + 16));
        c = fold(c, by_512, load(data + at + 32));
        d = fold(d, by_512, load(data + at + 48));
    }
    a = fold(fold(fold(a, by_128, b), by_128, c), by_128, d);
    for (; at < bytes; at += 16) a = fold(a, by_128, load(data + at));
    a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by_128, 0x10));
    a = _mm_xor_si128(_mm_srli_si128(a, 4), _mm_clmulepi64_si128(_mm_and_si128(a, even_words), by_64, 0x00));
    __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(a, even_words), barrett, 0x10);
    a = _mm_xor_si128(a, _mm_clmulepi64_si128(_mm_and_si128(quotient, even_words), barrett, 0x00));
    return uint32_t(_mm_extract_epi32(a, 1));
}

uint32_t crc_of(const uint8_t *data, int64_t bytes) {
    uint32_t crc = ~0u;
    int64_t at = 0;
    if (bytes >= 64) {
        at = bytes & ~int64_t(15);
        crc = fold_all(data, at, crc);
    }
    for (; at < bytes; ++at) crc = (crc >> 8) ^ kRemainders[(crc ^ data[at]) & 0xffu];
    return ~crc;
}

}  // namespace

int32_t ds_crc32_blocks(const void *data, int64_t bytes, int64_t block, uint32_t *crcs) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("pclmul") || !__builtin_cpu_supports("sse4.1")) return 0;
    const uint8_t *from = static_cast<const uint8_t *>(data);
    for (int64_t start = 0, i = 0; start < bytes; start += block, ++i)
        crcs[i] = crc_of(from + start, bytes - start < block ? bytes - start : block);
    return 1;
}

#else

int32_t ds_crc32_blocks(const void *, int64_t, int64_t, uint32_t *) { return 0; }

#endif
