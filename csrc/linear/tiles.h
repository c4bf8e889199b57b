// Products of R rows of prepared inputs with N rows of a matrix. Included once for each instruction set, in a namespace of
// its own and with DS_DOT set to what that set has: 0 nothing, 1 SSE2, 2 AVX2, 3 AVX-512, 4 AVX-512 with VNNI and BF16.
//
// [Note: products with equal bits] Of 16 lanes, number i adds up pairs of columns in the order of the columns; lanes are
// added up at the end. For integers the sums are exact. Products of two numbers of bfloat16 are exact in fp32, so that a
// fused multiply-add is a multiplication and an addition, and the dot product of AVX-512 BF16 is two of each (the odd
// column of a pair first). So every set gives the same bits, and R and N make no difference to a sum: what a row's output
// is depends on no other row. Subnormal numbers, which that dot product takes for zero, are the exception.

// [Note: parts of lanes] Lanes do not meet before the end. Where a register holds fewer than 16, a tile with many sums goes
// over its columns once for each part of the lanes, with the sums of that part in registers, instead of once with sums in
// memory; what it reads again is in the first-level cache. A tile with few sums, whose weights come from memory, holds all.

constexpr int kWidth = DS_DOT >= 3 ? 16 : DS_DOT == 2 ? 8 : ds::kPlainLanes;  // lanes of a register
constexpr int64_t kParts = kLanes / kWidth;                                   // registers of the lanes

using Floats = ds::Vector<kWidth>::Floats;
using Words = ds::Vector<kWidth>::Ints;

constexpr int64_t kPartBytes = sizeof(Words);

DS_INLINE void load_words(Words &to, const void *from) { std::memcpy(&to, from, sizeof to); }

// totals[i] = the sum of the lanes of vector i, of which the parts are registers. As ds::sum adds them.
template <int64_t N>
DS_INLINE void sums_of_parts(const Floats (&vectors)[N][kParts], float (&totals)[N]) {
    if constexpr (kParts == 1) {
        Lanes lanes[N];
        DS_UNROLL for (int64_t n = 0; n < N; ++n) lanes[n] = vectors[n][0];
        if constexpr (N == kLanes) {
            Lanes sums;
            ds::sums_beside(lanes, sums);
            ds::store(totals, sums);
        } else {
            ds::sums_of<N>(lanes, totals);
        }
    } else {
        using Four = ds::Vector<4>::Floats;
        Four fours[N];
        DS_UNROLL for (int64_t n = 0; n < N; ++n) {
            Floats sums[kParts];
            DS_UNROLL for (int64_t p = 0; p < kParts; ++p) sums[p] = vectors[n][p];
            DS_UNROLL for (int64_t half = kParts / 2; half > 0; half /= 2)
                DS_UNROLL for (int64_t p = 0; p < half; ++p) sums[p] += sums[p + half];
            if constexpr (kWidth == 8)
                fours[n] = __builtin_shufflevector(sums[0], sums[0], 0, 1, 2, 3) +
                           __builtin_shufflevector(sums[0], sums[0], 4, 5, 6, 7);
            else
                fours[n] = sums[0];
        }
        ds::sums_of_fours<N>(fours, totals);
    }
}

// sum += low halves * low halves + high halves * high halves, of 16-bit integers.
DS_INLINE void dot_integers(Words &sum, const Words &a, const Words &b) {
#if DS_DOT == 4
    sum = (Words)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif DS_DOT == 3
    sum += (Words)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif DS_DOT == 2
    sum += (Words)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif DS_DOT == 1
    sum += (Words)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    for (int i = 0; i < kWidth; ++i)
        sum[i] += int32_t(int16_t(a[i])) * int32_t(int16_t(b[i])) + (a[i] >> 16) * (b[i] >> 16);
#endif
}

// sum += high halves * high halves, then low halves * low halves, of bfloat16.
DS_INLINE void dot_bfloat16(Floats &sum, const Words &a, const Words &b) {
#if DS_DOT == 4
    sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#elif DS_DOT == 2
    sum = (Floats)_mm256_fmadd_ps((__m256)(a & ~0xffff), (__m256)(b & ~0xffff), (__m256)sum);
    sum = (Floats)_mm256_fmadd_ps((__m256)(a << 16), (__m256)(b << 16), (__m256)sum);
#else
    sum += (Floats)(a & ~0xffff) * (Floats)(b & ~0xffff);
    sum += (Floats)(a << 16) * (Floats)(b << 16);
#endif
}

template <int32_t kind>
DS_INLINE void add_product(Floats &sum, const Words &weights, const Words &input) {
    if constexpr (kind == DS_WEIGHTS_BFLOAT16)
        dot_bfloat16(sum, weights, input);
    else
        sum += (Floats)weights * (Floats)input;
}

// Number `part` of each 16 bits of words that hold integers of `bits` bits, widened to 16 bits.
template <int32_t bits>
DS_INLINE void take_part(Words &to, const Words &words, int32_t part) {
    using Shorts = int16_t __attribute__((vector_size(sizeof(Words))));
    to = (Words)((Shorts)((Shorts)words << (16 - bits * (part + 1))) >> (16 - bits));
}

// How a tile comes by its rows of the matrix.
//
// [Note: in order] Whoever is first to read them waits for the memory. With one or two short rows of inputs it reads the rows
// of the matrix one after the other, as they lie: the processor sees one stream, and has its lines on their way before they
// are needed. With more it reads them side by side, as there is more to multiply, and asks for the rows of a later tile. It
// asks the second-level cache: on Zen 4, what the first one was asked for came with half as many bytes per second, as did
// rows side by side that nobody asked for.
enum class Read { in_order, asking, again };

constexpr int64_t kInOrderRows = 2;         // of inputs, at most,
constexpr int64_t kInOrderBytes = 8 << 10;  // and these, which every row of the matrix reads again

// Lines that a tile asks of the memory beside those of its weights: for the second-level cache, as they would drive the
// inputs out of the first one.
struct Asked {
    const char *first, *second;

    DS_INLINE_MEMBER void ask(int64_t byte) const {
        ds::ask_for(first + byte);
        ds::ask_for(second + byte);
    }
};

// Columns [begin, end) of N rows, Q parts of their lanes, from where `matrix` and `inputs` begin; with `asks`, of what comes
// next as many lines are asked of the memory.
template <bool asks, int64_t R, int64_t N, int64_t Q, int32_t kind>
DS_INLINE void add_floats(const Work &work, const char *matrix, const char *inputs, int64_t begin, int64_t end,
                          Floats (&sums)[R][N][Q]) {
    constexpr int64_t item = kind == DS_WEIGHTS_BFLOAT16 ? 2 : 4;
    for (int64_t byte = begin * item; byte < end * item; byte += kLine) {
        Words weights[N][Q];
        DS_UNROLL for (int64_t n = 0; n < N; ++n)
            DS_UNROLL for (int64_t q = 0; q < Q; ++q)
                load_words(weights[n][q], matrix + n * work.row_bytes + byte + q * kPartBytes);
        if constexpr (asks)
            for (int64_t n = 0; n < N; ++n) ds::ask_for(matrix + n * work.row_bytes + byte + work.ahead);
        DS_UNROLL for (int64_t r = 0; r < R; ++r)
            DS_UNROLL for (int64_t q = 0; q < Q; ++q) {
                Words input;
                load_words(input, inputs + r * work.input_bytes + byte + q * kPartBytes);
                DS_UNROLL for (int64_t n = 0; n < N; ++n) add_product<kind>(sums[r][n][q], weights[n][q], input);
            }
    }
}

template <Read read, int64_t R, int64_t N, int32_t kind>
DS_INLINE void float_tile(const Work &work, const char *matrix, const char *inputs, float (&totals)[R * N]) {
    constexpr int64_t item = kind == DS_WEIGHTS_BFLOAT16 ? 2 : 4, step = kLine / item;
    constexpr int64_t many = read == Read::in_order ? 1 : N, Q = read == Read::in_order ? kParts : 1;
    const int64_t whole = work.columns / step * step;
    Floats sums[R * N][kParts];
    DS_UNROLL for (int64_t n = 0; n < N; n += many)
        DS_UNROLL for (int64_t part = 0; part < kParts; part += Q) {
            const char *weights = matrix + n * work.row_bytes + part * kPartBytes, *own = inputs + part * kPartBytes;
            Floats some[R][many][Q] = {};
            if (part == 0)
                add_floats<read == Read::asking, R, many, Q, kind>(work, weights, own, 0, whole, some);
            else
                add_floats<false, R, many, Q, kind>(work, weights, own, 0, whole, some);
            DS_UNROLL for (int64_t r = 0; r < R; ++r)
                DS_UNROLL for (int64_t i = 0; i < many; ++i)
                    DS_UNROLL for (int64_t q = 0; q < Q; ++q) sums[r * N + n + i][part + q] = some[r][i][q];
        }
    for (int64_t n = 0; n < N && whole < work.columns; ++n) {
        char rest[kLine] = {};
        std::memcpy(rest, matrix + n * work.row_bytes + whole * item, size_t((work.columns - whole) * item));
        for (int64_t r = 0; r < R; ++r)
            for (int64_t part = 0; part < kParts; ++part) {
                Words weights, input;
                load_words(weights, rest + part * kPartBytes);
                load_words(input, inputs + r * work.input_bytes + whole * item + part * kPartBytes);
                add_product<kind>(sums[r * N + n][part], weights, input);
            }
    }
    sums_of_parts<R * N>(sums, totals);
}

template <bool asks, int64_t R, int64_t N, int64_t Q, int32_t bits>
DS_INLINE void add_integers(const Work &work, const char *matrix, const char *inputs, const Asked *asked, int64_t begin,
                            int64_t end, Words (&sums)[N][R][Q]) {
    constexpr int64_t run = kLanes * 32 / bits;
    constexpr int32_t shorts = 16 / bits;  // of which a word of the weights makes pairs
    for (int64_t column = begin; column < end; column += run) {
        Words given[N][Q];
        if (asked != nullptr) asked->ask(column * bits / 8);
        DS_UNROLL for (int64_t n = 0; n < N; ++n)
            DS_UNROLL for (int64_t q = 0; q < Q; ++q)
                load_words(given[n][q], matrix + n * work.row_bytes + column * bits / 8 + q * kPartBytes);
        if constexpr (asks)
            for (int64_t n = 0; n < N; ++n)
                ds::ask_for(matrix + n * work.row_bytes + column * bits / 8 + work.ahead);
        DS_UNROLL for (int32_t number = 0; number < shorts; ++number) {
            Words weights[N][Q];
            DS_UNROLL for (int64_t n = 0; n < N; ++n)
                DS_UNROLL for (int64_t q = 0; q < Q; ++q) take_part<bits>(weights[n][q], given[n][q], number);
            DS_UNROLL for (int64_t r = 0; r < R; ++r)
                DS_UNROLL for (int64_t q = 0; q < Q; ++q) {
                    Words input;
                    load_words(input, inputs + r * work.input_bytes + column * 2 + number * kLine + q * kPartBytes);
                    DS_UNROLL for (int64_t n = 0; n < N; ++n) dot_integers(sums[n][r][q], weights[n][q], input);
                }
        }
    }
}

#if DS_DOT == 4
// See [Note: sums of bytes]. `raise`: where the sums of each row begin; null for zero. With `asks` the lines that `work` has
// ahead are asked of the memory; `asked`: others, if any.
template <bool asks, int64_t R, int64_t N, int32_t bits>
DS_INLINE void add_bytes(const Work &work, const char *matrix, const char *inputs, const char *raise, const Asked *asked,
                         int64_t begin, int64_t end, Words (&sums)[N][R][1]) {
    using Unsigned = uint32_t __attribute__((vector_size(sizeof(Words))));
    constexpr int64_t line = sizeof(Words), run = kLanes * 32 / bits, parts = 8 / bits;
    const __m512i half = _mm512_set1_epi8(bits == 8 ? char(0x80) : char(0x88)), mask = _mm512_set1_epi8(0x0f);
    __m512i high[N][R], low[N][R];
    DS_UNROLL for (int64_t n = 0; n < N; ++n)
        DS_UNROLL for (int64_t r = 0; r < R; ++r) {
            high[n][r] = _mm512_setzero_si512();
            low[n][r] = raise == nullptr ? high[n][r] : _mm512_loadu_si512(raise + r * work.input_bytes);
        }
    for (int64_t column = begin; column < end; column += run) {
        __m512i weights[parts][N];
        if (asked != nullptr) asked->ask(column * bits / 8);
        DS_UNROLL for (int64_t n = 0; n < N; ++n) {
            const char *from = matrix + n * work.row_bytes + column * bits / 8;
            const __m512i given = _mm512_loadu_si512(from);
            if constexpr (asks) ds::ask_for(from + work.ahead);
            if constexpr (bits == 8) {
                weights[0][n] = _mm512_xor_si512(given, half);
            } else {  // (given ^ half) & mask
                weights[0][n] = _mm512_ternarylogic_epi32(given, half, mask, 0x28);
                weights[1][n] = _mm512_ternarylogic_epi32((__m512i)((Unsigned)given >> 4), half, mask, 0x28);
            }
        }
        DS_UNROLL for (int64_t part = 0; part < parts; ++part)
            DS_UNROLL for (int64_t r = 0; r < R; ++r) {
                const char *input = inputs + r * work.input_bytes + column * 2 + part * 2 * line;
                const __m512i upper = _mm512_loadu_si512(input), lower = _mm512_loadu_si512(input + line);
                DS_UNROLL for (int64_t n = 0; n < N; ++n) {
                    high[n][r] = _mm512_dpbusd_epi32(high[n][r], weights[part][n], upper);
                    low[n][r] = _mm512_dpbusd_epi32(low[n][r], weights[part][n], lower);
                }
            }
    }
    DS_UNROLL for (int64_t n = 0; n < N; ++n)
        DS_UNROLL for (int64_t r = 0; r < R; ++r)
            sums[n][r][0] = (Words)(((Unsigned)high[n][r] << 7) + (Unsigned)low[n][r]);
}
#endif

// Columns [begin, end), the exact sum number `sum` of the rows.
template <bool asks, int64_t R, int64_t N, int64_t Q, int32_t bits>
DS_INLINE void exact_sum(const Work &work, const char *matrix, const char *inputs, int64_t begin, int64_t end,
                         int64_t sum, Words (&sums)[N][R][Q]) {
#if DS_DOT == 4
    const char *raise = inputs + work.raise_at + sum * kLine;
    add_bytes<asks, R, N, bits>(work, matrix, inputs, raise, nullptr, begin, end, sums);
#else
    (void)sum;
    add_integers<asks, R, N, Q, bits>(work, matrix, inputs, nullptr, begin, end, sums);
#endif
}

// The sums of N rows of the matrix over all groups, times the scales of these.
template <bool asks, int64_t R, int64_t N, int64_t Q, int32_t bits>
DS_INLINE void scaled_sums(const Work &work, const char *matrix, const char *inputs, const float *scales,
                           Floats (&scaled)[R][N][Q]) {
    int64_t sum = 0;
    for (int64_t g = 0; g < work.groups; ++g) {
        const int64_t end = (g + 1) * work.group;
        for (int64_t begin = g * work.group; begin < end; begin += kExactColumns, ++sum) {
            Words sums[N][R][Q] = {};
            const int64_t stop = end < begin + kExactColumns ? end : begin + kExactColumns;
            exact_sum<asks, R, N, Q, bits>(work, matrix, inputs, begin, stop, sum, sums);
            DS_UNROLL for (int64_t n = 0; n < N; ++n)
                DS_UNROLL for (int64_t r = 0; r < R; ++r)
                    DS_UNROLL for (int64_t q = 0; q < Q; ++q)
                        scaled[r][n][q] += scales[n * work.groups + g] * __builtin_convertvector(sums[n][r][q], Floats);
        }
    }
}

// As scaled_sums, without scales where there is one group.
template <bool asks, int64_t R, int64_t N, int64_t Q, int32_t bits>
DS_INLINE void sums_of_integers(const Work &work, const char *matrix, const char *inputs, int64_t output, bool grouped,
                                Floats (&sums)[R][N][Q]) {
    if (grouped)
        return scaled_sums<asks, R, N, Q, bits>(work, matrix, inputs, work.scales + output * work.groups, sums);
    Words exact[N][R][Q] = {};
    exact_sum<asks, R, N, Q, bits>(work, matrix, inputs, 0, work.group, 0, exact);
    DS_UNROLL for (int64_t r = 0; r < R; ++r)
        DS_UNROLL for (int64_t n = 0; n < N; ++n)
            DS_UNROLL for (int64_t q = 0; q < Q; ++q) sums[r][n][q] = __builtin_convertvector(exact[n][r][q], Floats);
}

template <Read read, int64_t R, int64_t N, int32_t bits>
DS_INLINE void integer_tile(const Work &work, const char *matrix, const char *inputs, int64_t output, int64_t row,
                            float (&totals)[R * N]) {
    constexpr int64_t many = read == Read::in_order ? 1 : N, Q = read == Read::in_order ? kParts : 1;
    const bool grouped = work.groups > 1 || work.group > kExactColumns;
    Floats sums[R * N][kParts];
    DS_UNROLL for (int64_t n = 0; n < N; n += many)
        DS_UNROLL for (int64_t part = 0; part < kParts; part += Q) {
            const char *weights = matrix + n * work.row_bytes + part * kPartBytes, *own = inputs + part * kPartBytes;
            Floats some[R][many][Q] = {};
            if (part == 0)
                sums_of_integers<read == Read::asking, R, many, Q, bits>(work, weights, own, output + n, grouped, some);
            else
                sums_of_integers<false, R, many, Q, bits>(work, weights, own, output + n, grouped, some);
            DS_UNROLL for (int64_t r = 0; r < R; ++r)
                DS_UNROLL for (int64_t i = 0; i < many; ++i)
                    DS_UNROLL for (int64_t q = 0; q < Q; ++q) sums[r * N + n + i][part + q] = some[r][i][q];
        }
    sums_of_parts<R * N>(sums, totals);
    for (int64_t r = 0; r < R; ++r)
        for (int64_t n = 0; n < N; ++n)
            totals[r * N + n] *=
                grouped ? work.input_scales[row + r] : work.scales[output + n] * work.input_scales[row + r];
}

// A function of its own: within a large one not all sums get registers.
template <Read read, int64_t R, int64_t N, int32_t kind>
DS_APART static void tile(const Work &work, int64_t output, int64_t row) {
    const char *matrix = work.matrix + output * work.row_bytes;
    const char *inputs = work.inputs + row * work.input_bytes;
    float totals[R * N];
    if constexpr (kind == DS_WEIGHTS_INT8)
        integer_tile<read, R, N, 8>(work, matrix, inputs, output, row, totals);
    else if constexpr (kind == DS_WEIGHTS_INT4)
        integer_tile<read, R, N, 4>(work, matrix, inputs, output, row, totals);
    else
        float_tile<read, R, N, kind>(work, matrix, inputs, totals);
    for (int64_t r = 0; r < R; ++r) {
        float values[N];
        for (int64_t n = 0; n < N; ++n)
            values[n] =
                totals[r * N + n] + (work.bias == nullptr ? 0.0f : number_at(work.bias, work.bias_dtype, output + n));
        char *target = work.output + ((row + r) * work.output_stride + output) * ds::item_size(work.output_dtype);
        ds::narrow(target, work.output_dtype, values, N);
    }
}

template <int64_t N, int32_t kind>
DS_INLINE void rows_of(const Work &work, int64_t output) {
    constexpr bool bytes = DS_DOT == 4 && (kind == DS_WEIGHTS_INT8 || kind == DS_WEIGHTS_INT4);  // two sums for each
    constexpr int64_t R = bytes ? 2 : 4;
    if (work.rows == 1) return tile<Read::in_order, 1, N, kind>(work, output, 0);
    if (work.rows == kInOrderRows && work.rows * work.input_bytes <= kInOrderBytes)
        return tile<Read::in_order, kInOrderRows, N, kind>(work, output, 0);
    int64_t row = 0;
    if (work.rows >= R) {
        tile<Read::asking, R, N, kind>(work, output, 0);
        row = R;
    }
    for (; row + R <= work.rows; row += R) tile<Read::again, R, N, kind>(work, output, row);
    if constexpr (R == 4) {
        if (work.rows - row >= 2) {
            tile<Read::asking, 2, N, kind>(work, output, row);
            row += 2;
        }
    }
    if (row < work.rows) tile<Read::again, 1, N, kind>(work, output, row);
}

#include "panels.h"

template <int32_t kind>
static void outputs_of(const Work &work, int64_t begin, int64_t end) {
    constexpr int64_t N = DS_DOT >= 3 ? 4 : 2;
    int64_t output = panels_of<kind>(work, begin, end);
    for (; output + N <= end; output += N) rows_of<N, kind>(work, output);
    for (; output < end; ++output) rows_of<1, kind>(work, output);
}

void compute(const Work &work, int32_t kind, int64_t begin, int64_t end) {
    switch (kind) {
        case DS_WEIGHTS_FLOAT32: return outputs_of<DS_WEIGHTS_FLOAT32>(work, begin, end);
        case DS_WEIGHTS_BFLOAT16: return outputs_of<DS_WEIGHTS_BFLOAT16>(work, begin, end);
        case DS_WEIGHTS_INT8: return outputs_of<DS_WEIGHTS_INT8>(work, begin, end);
        default: return outputs_of<DS_WEIGHTS_INT4>(work, begin, end);
    }
}
