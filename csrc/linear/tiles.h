// Products of R rows of prepared inputs with N rows of a matrix. Included once for each instruction set, in a namespace of
// its own and with DS_DOT set to what that set has: 0 nothing, 1 SSE2, 2 AVX2, 3 AVX-512, 4 AVX-512 with VNNI and BF16.
//
// [Note: products with equal bits] Of 16 lanes, number i adds up pairs of columns in the order of the columns; lanes are
// added up at the end. For integers the sums are exact. Products of two numbers of bfloat16 are exact in fp32, so that a
// fused multiply-add is a multiplication and an addition, and the dot product of AVX-512 BF16 is two of each (the odd
// column of a pair first). So every set gives the same bits, and R and N make no difference to a sum: what a row's output
// is depends on no other row. Subnormal numbers, which that dot product takes for zero, are the exception.

using Words = ds::IntLanes;

DS_INLINE void load_words(Words &to, const void *from) { std::memcpy(&to, from, sizeof to); }

// sum += low halves * low halves + high halves * high halves, of 16-bit integers.
DS_INLINE void dot_integers(Words &sum, const Words &a, const Words &b) {
#if DS_DOT == 4
    sum = (Words)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif DS_DOT == 3
    sum += (Words)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif DS_DOT == 2
    struct Parts {
        __m256i of[2];
    };
    const Parts left = std::bit_cast<Parts>(a), right = std::bit_cast<Parts>(b);
    Parts product;
    for (int i = 0; i < 2; ++i) product.of[i] = _mm256_madd_epi16(left.of[i], right.of[i]);
    Words wide;
    std::memcpy(&wide, &product, sizeof wide);
    sum += wide;
#elif DS_DOT == 1
    struct Parts {
        __m128i of[4];
    };
    const Parts left = std::bit_cast<Parts>(a), right = std::bit_cast<Parts>(b);
    Parts product;
    for (int i = 0; i < 4; ++i) product.of[i] = _mm_madd_epi16(left.of[i], right.of[i]);
    Words wide;
    std::memcpy(&wide, &product, sizeof wide);
    sum += wide;
#else
    for (int64_t i = 0; i < ds::kLanes; ++i)
        sum[i] += int32_t(int16_t(a[i])) * int32_t(int16_t(b[i])) + (a[i] >> 16) * (b[i] >> 16);
#endif
}

// sum += high halves * high halves, then low halves * low halves, of bfloat16.
DS_INLINE void dot_bfloat16(Lanes &sum, const Words &a, const Words &b) {
#if DS_DOT == 4
    sum = (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum += (Lanes)(a & ~0xffff) * (Lanes)(b & ~0xffff);
    sum += (Lanes)(a << 16) * (Lanes)(b << 16);
#endif
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

// Columns [begin, end) of N rows; with `asks`, of what comes next as many lines are asked of the memory.
template <bool asks, int64_t R, int64_t N, int32_t kind>
DS_INLINE void add_floats(const Work &work, const char *matrix, const char *inputs, int64_t begin, int64_t end,
                          Lanes (&sums)[R][N]) {
    constexpr int64_t item = kind == DS_WEIGHTS_BFLOAT16 ? 2 : 4;
    for (int64_t byte = begin * item; byte < end * item; byte += int64_t(sizeof(Words))) {
        Words weights[N];
        for (int64_t n = 0; n < N; ++n) load_words(weights[n], matrix + n * work.row_bytes + byte);
        if constexpr (asks)
            for (int64_t n = 0; n < N; ++n) ds::ask_for(matrix + n * work.row_bytes + byte + work.ahead);
        for (int64_t r = 0; r < R; ++r) {
            Words input;
            load_words(input, inputs + r * work.input_bytes + byte);
            for (int64_t n = 0; n < N; ++n) {
                if constexpr (kind == DS_WEIGHTS_BFLOAT16)
                    dot_bfloat16(sums[r][n], weights[n], input);
                else
                    sums[r][n] += (Lanes)weights[n] * (Lanes)input;
            }
        }
    }
}

template <Read read, int64_t R, int64_t N, int32_t kind>
DS_INLINE void float_tile(const Work &work, const char *matrix, const char *inputs, float (&totals)[R][N]) {
    constexpr int64_t step = kind == DS_WEIGHTS_BFLOAT16 ? 2 * ds::kLanes : ds::kLanes;
    constexpr int64_t item = kind == DS_WEIGHTS_BFLOAT16 ? 2 : 4, many = read == Read::in_order ? 1 : N;
    Lanes sums[R][N];
    const int64_t whole = work.columns / step * step;
    DS_UNROLL for (int64_t n = 0; n < N; n += many) {
        Lanes some[R][many] = {};
        add_floats<read == Read::asking, R, many, kind>(work, matrix + n * work.row_bytes, inputs, 0, whole, some);
        for (int64_t r = 0; r < R; ++r)
            for (int64_t i = 0; i < many; ++i) sums[r][n + i] = some[r][i];
    }
    for (int64_t n = 0; n < N && whole < work.columns; ++n) {
        char rest[sizeof(Words)] = {};
        std::memcpy(rest, matrix + n * work.row_bytes + whole * item, size_t((work.columns - whole) * item));
        Words weights, input;
        load_words(weights, rest);
        for (int64_t r = 0; r < R; ++r) {
            load_words(input, inputs + r * work.input_bytes + whole * item);
            if constexpr (kind == DS_WEIGHTS_BFLOAT16)
                dot_bfloat16(sums[r][n], weights, input);
            else
                sums[r][n] += (Lanes)weights * (Lanes)input;
        }
    }
    for (int64_t r = 0; r < R; ++r) ds::sums_of<N>(sums[r], totals[r]);
}

template <bool asks, int64_t R, int64_t N, int32_t bits>
DS_INLINE void add_integers(const Work &work, const char *matrix, const char *inputs, int64_t begin, int64_t end,
                            Words (&sums)[N][R]) {
    constexpr int64_t run = kLanes * 32 / bits;
    constexpr int32_t parts = 16 / bits;
    for (int64_t column = begin; column < end; column += run) {
        Words given[N];
        for (int64_t n = 0; n < N; ++n) load_words(given[n], matrix + n * work.row_bytes + column * bits / 8);
        if constexpr (asks)
            for (int64_t n = 0; n < N; ++n)
                ds::ask_for(matrix + n * work.row_bytes + column * bits / 8 + work.ahead);
        for (int32_t part = 0; part < parts; ++part) {
            Words weights[N];
            for (int64_t n = 0; n < N; ++n) take_part<bits>(weights[n], given[n], part);
            for (int64_t r = 0; r < R; ++r) {
                Words input;
                load_words(input, inputs + r * work.input_bytes + column * 2 + part * int64_t(sizeof(Words)));
                for (int64_t n = 0; n < N; ++n) dot_integers(sums[n][r], weights[n], input);
            }
        }
    }
}

// Lines that a tile asks of the memory beside those of its weights: for the second-level cache, as they would drive the
// inputs out of the first one.
struct Asked {
    const char *first, *second;

    DS_INLINE_MEMBER void ask(int64_t byte) const {
        ds::ask_for(first + byte);
        ds::ask_for(second + byte);
    }
};

#if DS_DOT == 4
// See [Note: sums of bytes]. `raise`: where the sums of each row begin; null for zero. With `asks` the lines that `work` has
// ahead are asked of the memory; `asked`: others, if any.
template <bool asks, int64_t R, int64_t N, int32_t bits>
DS_INLINE void add_bytes(const Work &work, const char *matrix, const char *inputs, const char *raise, const Asked *asked,
                         int64_t begin, int64_t end, Words (&sums)[N][R]) {
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
            sums[n][r] = (Words)(((Unsigned)high[n][r] << 7) + (Unsigned)low[n][r]);
}
#endif

// Columns [begin, end), the exact sum number `sum` of the rows.
template <bool asks, int64_t R, int64_t N, int32_t bits>
DS_INLINE void exact_sum(const Work &work, const char *matrix, const char *inputs, int64_t begin, int64_t end,
                         int64_t sum, Words (&sums)[N][R]) {
#if DS_DOT == 4
    const char *raise = inputs + work.raise_at + sum * int64_t(sizeof(Words));
    add_bytes<asks, R, N, bits>(work, matrix, inputs, raise, nullptr, begin, end, sums);
#else
    (void)sum;
    add_integers<asks, R, N, bits>(work, matrix, inputs, begin, end, sums);
#endif
}

// The sums of N rows of the matrix over all groups, times the scales of these.
template <bool asks, int64_t R, int64_t N, int32_t bits>
DS_INLINE void scaled_sums(const Work &work, const char *matrix, const char *inputs, const float *scales,
                           Lanes (&scaled)[R][N]) {
    int64_t sum = 0;
    for (int64_t g = 0; g < work.groups; ++g) {
        const int64_t end = (g + 1) * work.group;
        for (int64_t begin = g * work.group; begin < end; begin += kExactColumns, ++sum) {
            Words sums[N][R] = {};
            const int64_t stop = end < begin + kExactColumns ? end : begin + kExactColumns;
            exact_sum<asks, R, N, bits>(work, matrix, inputs, begin, stop, sum, sums);
            for (int64_t n = 0; n < N; ++n)
                for (int64_t r = 0; r < R; ++r)
                    scaled[r][n] += scales[n * work.groups + g] * __builtin_convertvector(sums[n][r], Lanes);
        }
    }
}

template <Read read, int64_t R, int64_t N, int32_t bits>
DS_INLINE void integer_tile(const Work &work, const char *matrix, const char *inputs, int64_t output, int64_t row,
                            float (&totals)[R][N]) {
    constexpr int64_t many = read == Read::in_order ? 1 : N;
    constexpr bool asks = read == Read::asking;
    const bool grouped = work.groups > 1 || work.group > kExactColumns;
    Lanes sums[R][N];
    DS_UNROLL for (int64_t n = 0; n < N; n += many) {
        const char *rows = matrix + n * work.row_bytes;
        Lanes some[R][many] = {};
        if (grouped) {
            scaled_sums<asks, R, many, bits>(work, rows, inputs, work.scales + (output + n) * work.groups, some);
        } else {
            Words exact[many][R] = {};
            exact_sum<asks, R, many, bits>(work, rows, inputs, 0, work.group, 0, exact);
            for (int64_t r = 0; r < R; ++r)
                for (int64_t i = 0; i < many; ++i) some[r][i] = __builtin_convertvector(exact[i][r], Lanes);
        }
        for (int64_t r = 0; r < R; ++r)
            for (int64_t i = 0; i < many; ++i) sums[r][n + i] = some[r][i];
    }
    for (int64_t r = 0; r < R; ++r) {
        ds::sums_of<N>(sums[r], totals[r]);
        for (int64_t n = 0; n < N; ++n)
            totals[r][n] *= grouped ? work.input_scales[row + r] : work.scales[output + n] * work.input_scales[row + r];
    }
}

template <Read read, int64_t R, int64_t N, int32_t kind>
DS_INLINE void tile(const Work &work, int64_t output, int64_t row) {
    const char *matrix = work.matrix + output * work.row_bytes;
    const char *inputs = work.inputs + row * work.input_bytes;
    float totals[R][N];
    if constexpr (kind == DS_WEIGHTS_INT8)
        integer_tile<read, R, N, 8>(work, matrix, inputs, output, row, totals);
    else if constexpr (kind == DS_WEIGHTS_INT4)
        integer_tile<read, R, N, 4>(work, matrix, inputs, output, row, totals);
    else
        float_tile<read, R, N, kind>(work, matrix, inputs, totals);
    for (int64_t r = 0; r < R; ++r) {
        float values[N];
        for (int64_t n = 0; n < N; ++n)
            values[n] = totals[r][n] + (work.bias == nullptr ? 0.0f : number_at(work.bias, work.bias_dtype, output + n));
        char *target = work.output + ((row + r) * work.output_stride + output) * ds::item_size(work.output_dtype);
        ds::narrow(target, work.output_dtype, values, N);
    }
}

template <int64_t N, int32_t kind>
DS_INLINE void rows_of(const Work &work, int64_t output) {
    constexpr bool bytes = DS_DOT == 4 && (kind == DS_WEIGHTS_INT8 || kind == DS_WEIGHTS_INT4);  // two sums for each
    constexpr int64_t R = DS_DOT >= 3 && !bytes ? 4 : 2;
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

static void compute(const Work &work, int32_t kind, int64_t begin, int64_t end) {
    switch (kind) {
        case DS_WEIGHTS_FLOAT32: return outputs_of<DS_WEIGHTS_FLOAT32>(work, begin, end);
        case DS_WEIGHTS_BFLOAT16: return outputs_of<DS_WEIGHTS_BFLOAT16>(work, begin, end);
        case DS_WEIGHTS_INT8: return outputs_of<DS_WEIGHTS_INT8>(work, begin, end);
        default: return outputs_of<DS_WEIGHTS_INT4>(work, begin, end);
    }
}
