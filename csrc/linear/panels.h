// Products of a panel of rows, up to 16, with 16 rows of a matrix at a time. Included by tiles.h.
//
// [Note: panels] Of one row, the memory decides how long a product takes; of 16, the multiplications take as long, and all
// that keeps them waiting. So columns are cut into chunks, of which the inputs of all rows stay in the first-level cache
// while the weights of 16 outputs go by; the weights that come next are asked of the memory a line at a time all the while;
// and at the end, 16 sums at a time are added up across their lanes. A lane adds what it adds in tiles.h, in that order.

constexpr int64_t kPanelRows = 16;
constexpr int64_t kPanelOutputs = 16;
constexpr int64_t kPanelTile = DS_DOT >= 3 ? 4 : 2;  // outputs of which the sums are in registers
constexpr int64_t kChunkOfIntegers = 1536;           // bytes of inputs of a row, at most

// Lanes of the sums; of integers in one group the integers.
using PanelSums = float[kPanelRows][kPanelOutputs][ds::kLanes];

DS_INLINE float *at(float *sums, int64_t r, int64_t n) { return sums + (r * kPanelOutputs + n) * ds::kLanes; }

template <int32_t kind>
constexpr bool are_integers = kind == DS_WEIGHTS_INT8 || kind == DS_WEIGHTS_INT4;

#if DS_DOT == 4
// Bytes [begin, end) of R rows' inputs; a chunk is a group where there are several. `ask`: lines beside those of the weights,
// to ask of the memory.
template <int64_t R, int32_t kind>
DS_INLINE void panel_bytes(const Work &work, const char *matrix, const char *inputs, const char *ask, const float *scales,
                           int64_t begin, int64_t end, float *to) {
    using Unsigned = uint32_t __attribute__((vector_size(sizeof(Words))));
    constexpr int64_t N = kPanelTile;
    const bool grouped = work.groups > 1;
    const int64_t group = grouped ? begin / (end - begin) : 0;
    const char *raise = inputs + work.raise_at + group * int64_t(sizeof(Words));
    Words sums[N][R];
    add_bytes<R, N, kind == DS_WEIGHTS_INT8 ? 8 : 4>(work, matrix, inputs, begin == 0 || grouped ? raise : nullptr, ask,
                                                     begin / 2, end / 2, sums);
    DS_UNROLL for (int64_t r = 0; r < R; ++r)
        DS_UNROLL for (int64_t n = 0; n < N; ++n) {
            if (grouped) {
                Lanes scaled = {};
                if (begin > 0) ds::load(scaled, at(to, r, n));
                scaled += scales[n * work.groups + group] * __builtin_convertvector(sums[n][r], Lanes);
                ds::store(at(to, r, n), scaled);
            } else {
                Words before = {};
                if (begin > 0) load_words(before, at(to, r, n));
                before = (Words)((Unsigned)before + (Unsigned)sums[n][r]);
                std::memcpy(at(to, r, n), &before, sizeof before);
            }
        }
}
#endif

template <int64_t R, int32_t kind>
DS_INLINE void panel_tile(const Work &work, const char *matrix, const char *inputs, const char *ask, int64_t output,
                          int64_t begin, int64_t end, float *to) {
#if DS_DOT == 4
    panel_bytes<R, kind>(work, matrix, inputs, ask, work.scales + output * work.groups, begin, end, to);
#else
    (void)work, (void)matrix, (void)inputs, (void)ask, (void)output, (void)begin, (void)end, (void)to;
#endif
}

// Lanes -> what the rows of the panel put out.
template <int32_t kind>
DS_INLINE void finish_panel(const Work &work, int64_t output, int64_t row, int64_t rows, PanelSums &sums) {
    Lanes scales = {}, bias = {};
    const bool grouped = are_integers<kind> && work.groups > 1;
    if (are_integers<kind> && !grouped) ds::load(scales, work.scales + output);
    if (work.bias != nullptr)
        for (int64_t n = 0; n < kPanelOutputs; ++n) bias[n] = number_at(work.bias, work.bias_dtype, output + n);
    for (int64_t r = 0; r < rows; ++r) {
        Lanes totals;
        if (are_integers<kind> && !grouped)
            for (int64_t n = 0; n < kPanelOutputs; ++n) {
                Words sum;
                load_words(sum, sums[r][n]);
                ds::store(sums[r][n], __builtin_convertvector(sum, Lanes));
            }
        ds::sums_beside(sums[r], totals);
        if constexpr (are_integers<kind>) {
            const Lanes of_row = work.input_scales[row + r] + Lanes{};
            totals *= grouped ? of_row : scales * of_row;
        }
        totals += bias;
        char *target = work.output + ((row + r) * work.output_stride + output) * ds::item_size(work.output_dtype);
        if (work.output_dtype == DS_FLOAT32) {
            std::memcpy(target, &totals, sizeof totals);
        } else {
            float values[kPanelOutputs];
            ds::store(values, totals);
            ds::narrow(target, work.output_dtype, values, kPanelOutputs);
        }
    }
}

template <int32_t kind>
DS_INLINE void panel(const Work &work, int64_t output, int64_t row, int64_t rows, int64_t chunk, int64_t length,
                     PanelSums &sums) {
    constexpr int64_t N = kPanelTile, R = 2;
    constexpr int64_t shrunk = kind == DS_WEIGHTS_INT8 ? 2 : kind == DS_WEIGHTS_INT4 ? 4 : 1;  // weights, beside inputs
    const char *inputs = work.inputs + row * work.input_bytes;
    for (int64_t begin = 0; begin < length; begin += chunk) {
        const int64_t end = begin + chunk < length ? begin + chunk : length;
        // the same rows' next chunk, or the first chunk of the rows that come next
        const int64_t further = end < length ? chunk / shrunk : kPanelOutputs * work.row_bytes - begin / shrunk;
        for (int64_t n = 0; n < kPanelOutputs; n += N) {
            const char *matrix = work.matrix + (output + n) * work.row_bytes;
            const auto tile_at = [&](auto count, int64_t r, int64_t asked) {
                const char *ask = matrix + (asked < N ? asked * work.row_bytes + further : 0);
                panel_tile<decltype(count)::value, kind>(work, matrix, inputs + r * work.input_bytes, ask, output + n,
                                                         begin, end, sums[r][n]);
            };
            // each tile asks for the lines of another row of the matrix, or every second one does
            const int64_t whole = rows / R, every = whole >= 2 * N ? 2 : 1;
            const int64_t asking = row > 0 ? 0 : whole / every < N ? whole / every : N;
            for (int64_t asked = asking; asked < N && row == 0; ++asked)
                for (int64_t byte = begin / shrunk; byte < end / shrunk; byte += kLine)
                    __builtin_prefetch(matrix + asked * work.row_bytes + further + byte);
            int64_t r = 0;
            for (int64_t tile = 0; tile < whole; ++tile, r += R)
                tile_at(std::integral_constant<int64_t, R>(), r,
                        tile % every == 0 && tile / every < asking ? tile / every : N);
            for (; r < rows; ++r) tile_at(std::integral_constant<int64_t, 1>(), r, N);
        }
    }
    finish_panel<kind>(work, output, row, rows, sums);
}

#include "float_panels.h"

// Bytes of inputs of a chunk: about equal ones, or a group; 0 where the matrix cannot be cut so.
template <int32_t kind>
static int64_t chunk_of(const Work &work, int64_t length) {
    if (work.rows <= kPanelTile || (are_integers<kind> && DS_DOT != 4)) return 0;
    if (are_integers<kind> && work.groups > 1) return work.group * 2 <= kChunkOfIntegers ? work.group * 2 : 0;
    if (are_integers<kind> && work.group > kExactColumns) return 0;
    constexpr int64_t run = kind == DS_WEIGHTS_INT8 ? 128 : kind == DS_WEIGHTS_INT4 ? 256 : int64_t(sizeof(Words));
    if (length % run != 0) return 0;
    if (!are_integers<kind>) return float_chunk(length, std::min(work.rows, kPanelRows));
    const int64_t chunks = (length + kChunkOfIntegers - 1) / kChunkOfIntegers;
    return (length / run + chunks - 1) / chunks * run;
}

// Outputs from `begin` on, as many as whole panels have. Returns where they end.
template <int32_t kind>
static int64_t panels_of(const Work &work, int64_t begin, int64_t end) {
    const int64_t length =
        are_integers<kind> ? work.group * work.groups * 2 : work.columns * (kind == DS_WEIGHTS_FLOAT32 ? 4 : 2);
    const int64_t chunk = chunk_of<kind>(work, length);
    if (chunk == 0) return begin;
    alignas(64) PanelSums sums;
    for (; begin + kPanelOutputs <= end; begin += kPanelOutputs)
        for (int64_t row = 0; row < work.rows; row += kPanelRows) {
            const int64_t rows = work.rows - row < kPanelRows ? work.rows - row : kPanelRows;
            if constexpr (are_integers<kind>)
                panel<kind>(work, begin, row, rows, chunk, length, sums);
            else
                float_panel<kind>(work, begin, row, rows, chunk, length, sums);
        }
    return begin;
}
