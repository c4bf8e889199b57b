// Products of a panel of rows, up to 16, with 16 rows of a matrix at a time. Included by tiles.h.
//
// [Note: panels] Of one row, the memory decides how long a product takes; of 16, the multiplications take as long, and all
// that keeps them waiting. So columns are cut into chunks, of which a tile's inputs and weights fit the first-level cache
// and the inputs of all rows the second; the weights that come next are asked of the memory a line at a time all the while,
// as they lie; and at the end, 16 sums at a time are added up across their lanes, those of a tile while they are in
// registers. A lane adds what it adds in tiles.h, in that order.

constexpr int64_t kPanelRows = 16;
constexpr int64_t kPanelOutputs = 16;
constexpr int64_t kPanelTile = DS_DOT >= 3 ? 4 : 2;  // outputs of which the sums are in registers
constexpr int64_t kChunk = 3072;                     // bytes of inputs of a row, at most: of floats,
constexpr int64_t kChunkOfIntegers = 1536;           // and of integers, of which fewer sums are in registers

// Lanes of the sums; of integers in one group the integers.
using PanelSums = float[kPanelRows][kPanelOutputs][ds::kLanes];

DS_INLINE float *at(float *sums, int64_t r, int64_t n) { return sums + (r * kPanelOutputs + n) * ds::kLanes; }

template <int32_t kind>
constexpr bool are_integers = kind == DS_WEIGHTS_INT8 || kind == DS_WEIGHTS_INT4;

// Whether a tile of floats has as many sums as there are lanes, which are then added up together.
template <int64_t R, int32_t kind>
constexpr bool ends_at_once = !are_integers<kind> && R * kPanelTile == ds::kLanes;

// Sums of a tile -> what its rows put out.
template <int64_t R>
DS_INLINE void finish_tile(const Work &work, const Lanes (&sums)[R][kPanelTile], int64_t output, int64_t row) {
    constexpr int64_t N = kPanelTile;
    Lanes beside[ds::kLanes], totals, bias = {};
    DS_UNROLL for (int64_t r = 0; r < R; ++r)
        DS_UNROLL for (int64_t n = 0; n < N; ++n) beside[r * N + n] = sums[r][n];
    ds::sums_beside(beside, totals);
    if (work.bias != nullptr)
        for (int64_t i = 0; i < ds::kLanes; ++i) bias[i] = number_at(work.bias, work.bias_dtype, output + i % N);
    totals += bias;
    const int64_t item = ds::item_size(work.output_dtype);
    float values[ds::kLanes];
    ds::store(values, totals);
    char narrow[sizeof values];
    ds::narrow(narrow, work.output_dtype, values, ds::kLanes);
    for (int64_t r = 0; r < R; ++r)
        std::memcpy(work.output + ((row + r) * work.output_stride + output) * item, narrow + r * N * item, size_t(N * item));
}

// Bytes [begin, end) of R rows' inputs. `last`: these are the last ones.
template <int64_t R, int32_t kind>
DS_INLINE void panel_floats(const Work &work, const char *matrix, const char *inputs, const Asked &asked, int64_t begin,
                            int64_t end, bool last, int64_t output, int64_t row, float *to) {
    constexpr int64_t N = kPanelTile;
    Lanes sums[R][N];
    DS_UNROLL for (int64_t r = 0; r < R; ++r)
        DS_UNROLL for (int64_t n = 0; n < N; ++n) {
            if (begin == 0)
                sums[r][n] = Lanes{};
            else
                ds::load(sums[r][n], at(to, r, n));
        }
    for (int64_t byte = begin; byte < end; byte += int64_t(sizeof(Words))) {
        Words weights[N];
        asked.ask(byte);
        DS_UNROLL for (int64_t n = 0; n < N; ++n) load_words(weights[n], matrix + n * work.row_bytes + byte);
        DS_UNROLL for (int64_t r = 0; r < R; ++r) {
            Words input;
            load_words(input, inputs + r * work.input_bytes + byte);
            DS_UNROLL for (int64_t n = 0; n < N; ++n) {
                if constexpr (kind == DS_WEIGHTS_BFLOAT16)
                    dot_bfloat16(sums[r][n], weights[n], input);
                else
                    sums[r][n] += (Lanes)weights[n] * (Lanes)input;
            }
        }
    }
    if constexpr (ends_at_once<R, kind>)
        if (last) return finish_tile<R>(work, sums, output, row);
    (void)last, (void)output, (void)row;
    DS_UNROLL for (int64_t r = 0; r < R; ++r)
        DS_UNROLL for (int64_t n = 0; n < N; ++n) ds::store(at(to, r, n), sums[r][n]);
}

#if DS_DOT == 4
// The same of integers; a chunk is a group where there are several.
template <int64_t R, int32_t kind>
DS_INLINE void panel_bytes(const Work &work, const char *matrix, const char *inputs, const Asked &asked,
                           const float *scales, int64_t begin, int64_t end, float *to) {
    using Unsigned = uint32_t __attribute__((vector_size(sizeof(Words))));
    constexpr int64_t N = kPanelTile;
    const bool grouped = work.groups > 1;
    const int64_t group = grouped ? begin / (end - begin) : 0;
    const char *raise = inputs + work.raise_at + group * int64_t(sizeof(Words));
    Words sums[N][R];
    add_bytes<false, R, N, kind == DS_WEIGHTS_INT8 ? 8 : 4>(work, matrix, inputs, begin == 0 || grouped ? raise : nullptr, &asked,
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
DS_INLINE void panel_tile(const Work &work, const char *matrix, const char *inputs, const Asked &asked, int64_t output,
                          int64_t row, int64_t begin, int64_t end, bool last, float *to) {
#if DS_DOT == 4
    if constexpr (are_integers<kind>)
        return panel_bytes<R, kind>(work, matrix, inputs, asked, work.scales + output * work.groups, begin, end, to);
#endif
    if constexpr (!are_integers<kind>)
        panel_floats<R, kind>(work, matrix, inputs, asked, begin, end, last, output, row, to);
}

// Sums in memory -> what rows [first, rows) of the panel put out.
template <int32_t kind>
DS_INLINE void finish_panel(const Work &work, int64_t output, int64_t row, int64_t first, int64_t rows,
                            PanelSums &sums) {
    Lanes scales = {}, bias = {};
    const bool grouped = are_integers<kind> && work.groups > 1;
    if (are_integers<kind> && !grouped) ds::load(scales, work.scales + output);
    if (work.bias != nullptr)
        for (int64_t n = 0; n < kPanelOutputs; ++n) bias[n] = number_at(work.bias, work.bias_dtype, output + n);
    for (int64_t r = first; r < rows; ++r) {
        Lanes beside[kPanelOutputs], totals;
        DS_UNROLL for (int64_t n = 0; n < kPanelOutputs; ++n) {
            ds::load(beside[n], sums[r][n]);
            if (are_integers<kind> && !grouped) {
                Words sum;
                load_words(sum, sums[r][n]);
                beside[n] = __builtin_convertvector(sum, Lanes);
            }
        }
        ds::sums_beside(beside, totals);
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
    constexpr int64_t N = kPanelTile, R = DS_DOT < 3 || are_integers<kind> ? 2 : 4;
    constexpr int64_t shrunk = kind == DS_WEIGHTS_INT8 ? 2 : kind == DS_WEIGHTS_INT4 ? 4 : 1;  // weights, beside inputs
    const char *inputs = work.inputs + row * work.input_bytes;
    const char *ask = work.matrix + (output + kPanelOutputs) * work.row_bytes;  // the outputs that come next, in order
    for (int64_t begin = 0; begin < length; begin += chunk) {
        const int64_t end = begin + chunk < length ? begin + chunk : length;
        const int64_t stretch = (end - begin) / shrunk;  // bytes of a row of the matrix
        for (int64_t n = 0; n < kPanelOutputs; n += N) {
            const char *matrix = work.matrix + (output + n) * work.row_bytes;
            // as many lines as a tile reads are asked for, shared between the tiles of rows
            const int64_t tiles = (rows + R - 1) / R;
            const int64_t every = tiles >= 2 * N ? 2 : 1, share = tiles < N ? 2 : 1;
            int64_t left = row == 0 ? N : 0, tile = 0;
            const auto tile_at = [&](auto count, int64_t r) {
                const int64_t stretches = tile++ % every == 0 ? (share < left ? share : left) : 0;
                // who asks for nothing asks for what is there
                const char *first = stretches > 0 ? ask - begin / shrunk : matrix;
                const Asked asked{first, stretches > 1 ? first + stretch : first};
                left -= stretches;
                ask += stretches * stretch;
                panel_tile<decltype(count)::value, kind>(work, matrix, inputs + r * work.input_bytes, asked, output + n,
                                                         row + r, begin, end, end == length, sums[r][n]);
            };
            int64_t r = 0;
            for (; r + R <= rows; r += R) tile_at(std::integral_constant<int64_t, R>(), r);
            if constexpr (R == 4) {
                if (rows - r == 3) tile_at(std::integral_constant<int64_t, 3>(), r);
                if (rows - r == 2) tile_at(std::integral_constant<int64_t, 2>(), r);
            }
            if (rows - r == 1) tile_at(std::integral_constant<int64_t, 1>(), r);
            ask += left * stretch;
        }
    }
    const int64_t ended = ends_at_once<R, kind> ? rows / R * R : 0;
    if (ended < rows) finish_panel<kind>(work, output, row, ended, rows, sums);
}

// Bytes of inputs of a chunk: about equal ones, or a group; 0 where the matrix cannot be cut so.
template <int32_t kind>
static int64_t chunk_of(const Work &work, int64_t length) {
    if (work.rows <= kPanelTile || (are_integers<kind> && DS_DOT != 4)) return 0;
    if (are_integers<kind> && work.groups > 1) return work.group * 2 <= kChunkOfIntegers ? work.group * 2 : 0;
    if (are_integers<kind> && work.group > kExactColumns) return 0;
    constexpr int64_t run = kind == DS_WEIGHTS_INT8 ? 128 : kind == DS_WEIGHTS_INT4 ? 256 : int64_t(sizeof(Words));
    if (length % run != 0) return 0;
    constexpr int64_t most = are_integers<kind> ? kChunkOfIntegers : kChunk;
    const int64_t chunks = (length + most - 1) / most;
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
        for (int64_t row = 0; row < work.rows; row += kPanelRows)
            panel<kind>(work, begin, row, work.rows - row < kPanelRows ? work.rows - row : kPanelRows, chunk, length, sums);
    return begin;
}
