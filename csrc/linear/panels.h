// Products of a panel of rows, up to 16, with 16 rows of a matrix at a time. Included by tiles.h.
//
// [Note: panels] Of one row, the memory decides how long a product takes; of 16, the multiplications take as long, and all
// that keeps them waiting. So columns are cut into chunks, of which a tile's inputs and weights fit the first-level cache
// and the inputs of all rows the second (the first, where registers are small and tiles read them more often); the weights that come next are asked of the memory a line at a time all the while,
// as they lie; and at the end, 16 sums at a time are added up across their lanes, those of a tile while they are in
// registers. A lane adds what it adds in tiles.h, in that order.

constexpr int64_t kPanelRows = 16;
constexpr int64_t kPanelOutputs = 16;
constexpr int64_t kPanelTile = DS_DOT >= 3 ? 4 : 2;    // outputs of which the sums are in registers
constexpr int64_t kChunk = DS_DOT >= 3 ? 3072 : 1024;  // bytes of inputs of a row, at most: of floats,
constexpr int64_t kChunkOfIntegers = 1536;             // and of integers, of which fewer sums are in registers

// Lanes of the sums; of integers in one group the integers.
using PanelSums = float[kPanelRows][kPanelOutputs][ds::kLanes];

DS_INLINE float *at(float *sums, int64_t r, int64_t n) { return sums + (r * kPanelOutputs + n) * ds::kLanes; }

template <int32_t kind>
constexpr bool are_integers = kind == DS_WEIGHTS_INT8 || kind == DS_WEIGHTS_INT4;

// Whether a tile of floats has as many sums as there are lanes, which are then added up together.
template <int64_t R, int32_t kind>
constexpr bool ends_at_once = !are_integers<kind> && kParts == 1 && R * kPanelTile == ds::kLanes;

// Sums of a tile -> what its rows put out.
template <int64_t R>
DS_INLINE void finish_tile(const Work &work, const Floats (&sums)[R][kPanelTile], int64_t output, int64_t row) {
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

DS_INLINE void load_part(Floats &to, const float *from) { std::memcpy(&to, from, sizeof to); }
DS_INLINE void store_part(float *to, const Floats &from) { std::memcpy(to, &from, sizeof from); }

template <int64_t R>
DS_INLINE void store_parts(float *to, const Floats (&sums)[R][kPanelTile]) {
    DS_UNROLL for (int64_t r = 0; r < R; ++r)
        DS_UNROLL for (int64_t n = 0; n < kPanelTile; ++n) store_part(at(to, r, n), sums[r][n]);
}

// One part of the lanes; see panel_floats. A function of its own, as a tile is.
template <bool asks, int64_t R, int32_t kind>
DS_APART static void panel_part(const Work &work, const char *matrix, const char *inputs, const Asked &asked, int64_t begin,
                          int64_t end, bool last, int64_t output, int64_t row, float *to) {
    constexpr int64_t N = kPanelTile;
    Floats sums[R][N];
    DS_UNROLL for (int64_t r = 0; r < R; ++r)
        DS_UNROLL for (int64_t n = 0; n < N; ++n) {
            if (begin == 0)
                sums[r][n] = Floats{};
            else
                load_part(sums[r][n], at(to, r, n));
        }
    for (int64_t byte = begin; byte < end; byte += kLine) {
        Words weights[N];
        if constexpr (asks) asked.ask(byte);
        DS_UNROLL for (int64_t n = 0; n < N; ++n) load_words(weights[n], matrix + n * work.row_bytes + byte);
        DS_UNROLL for (int64_t r = 0; r < R; ++r) {
            Words input;
            load_words(input, inputs + r * work.input_bytes + byte);
            DS_UNROLL for (int64_t n = 0; n < N; ++n) add_product<kind>(sums[r][n], weights[n], input);
        }
    }
    if constexpr (ends_at_once<R, kind>)
        if (last) return finish_tile<R>(work, sums, output, row);
    (void)last, (void)output, (void)row;
    store_parts<R>(to, sums);
}

// Bytes [begin, end) of R rows' inputs. `last`: these are the last ones.
template <int64_t R, int32_t kind>
DS_INLINE void panel_floats(const Work &work, const char *matrix, const char *inputs, const Asked &asked, int64_t begin,
                            int64_t end, bool last, int64_t output, int64_t row, float *to) {
    panel_part<true, R, kind>(work, matrix, inputs, asked, begin, end, last, output, row, to);
    DS_UNROLL for (int64_t part = 1; part < kParts; ++part)
        panel_part<false, R, kind>(work, matrix + part * kPartBytes, inputs + part * kPartBytes, asked, begin, end, last,
                                   output, row, to + part * kWidth);
}

// The same of integers, of inputs' columns [begin, end). `group`: of the scales, -1 if there is one group only.
template <bool asks, int64_t R, int32_t kind>
DS_APART static void panel_part_of_integers(const Work &work, const char *matrix, const char *inputs, const Asked &asked,
                                            const float *scales, int64_t group, int64_t begin, int64_t end, float *to) {
    using Unsigned = ds::Vector<kWidth>::Words;
    constexpr int64_t N = kPanelTile;
    constexpr int32_t bits = kind == DS_WEIGHTS_INT8 ? 8 : 4;
    Words sums[N][R][1] = {};
#if DS_DOT == 4
    const char *raise = inputs + work.raise_at + (group < 0 ? 0 : group) * kLine;
    add_bytes<false, R, N, bits>(work, matrix, inputs, begin == 0 || group >= 0 ? raise : nullptr, &asked, begin, end, sums);
#else
    add_integers<false, R, N, 1, bits>(work, matrix, inputs, asks ? &asked : nullptr, begin, end, sums);
#endif
    DS_UNROLL for (int64_t r = 0; r < R; ++r)
        DS_UNROLL for (int64_t n = 0; n < N; ++n) {
            float *own = at(to, r, n);
            if (group >= 0) {
                Floats scaled = {};
                if (begin > 0) load_part(scaled, own);
                scaled += scales[n * work.groups + group] * __builtin_convertvector(sums[n][r][0], Floats);
                store_part(own, scaled);
            } else {
                Words before = {};
                if (begin > 0) load_words(before, own);
                before = (Words)((Unsigned)before + (Unsigned)sums[n][r][0]);
                std::memcpy(own, &before, sizeof before);
            }
        }
}

// The same of integers; a chunk is a group where there are several.
template <int64_t R, int32_t kind>
DS_INLINE void panel_integers(const Work &work, const char *matrix, const char *inputs, const Asked &asked,
                              const float *scales, int64_t begin, int64_t end, float *to) {
    const int64_t group = work.groups > 1 ? begin / (end - begin) : -1;
    panel_part_of_integers<true, R, kind>(work, matrix, inputs, asked, scales, group, begin / 2, end / 2, to);
    DS_UNROLL for (int64_t part = 1; part < kParts; ++part)
        panel_part_of_integers<false, R, kind>(work, matrix + part * kPartBytes, inputs + part * kPartBytes, asked, scales,
                                               group, begin / 2, end / 2, to + part * kWidth);
}

template <int64_t R, int32_t kind>
DS_INLINE void panel_tile(const Work &work, const char *matrix, const char *inputs, const Asked &asked, int64_t output,
                          int64_t row, int64_t begin, int64_t end, bool last, float *to) {
    if constexpr (are_integers<kind>)
        panel_integers<R, kind>(work, matrix, inputs, asked, work.scales + output * work.groups, begin, end, to);
    else
        panel_floats<R, kind>(work, matrix, inputs, asked, begin, end, last, output, row, to);
}

// totals[n] = the sum of the lanes of sums[n]; of `integers` the lanes are such.
DS_INLINE void sums_of_outputs(const float (&sums)[kPanelOutputs][ds::kLanes], bool integers,
                               float (&totals)[kPanelOutputs]) {
    constexpr int64_t many = kParts == 1 ? kPanelOutputs : 4;
    DS_UNROLL for (int64_t n = 0; n < kPanelOutputs; n += many) {
        Floats beside[many][kParts];
        DS_UNROLL for (int64_t i = 0; i < many; ++i)
            DS_UNROLL for (int64_t part = 0; part < kParts; ++part) {
                load_part(beside[i][part], sums[n + i] + part * kWidth);
                if (integers) beside[i][part] = __builtin_convertvector((Words)beside[i][part], Floats);
            }
        float some[many];
        sums_of_parts<many>(beside, some);
        std::memcpy(totals + n, some, sizeof some);
    }
}

// Sums in memory -> what rows [first, rows) of the panel put out.
template <int32_t kind>
DS_INLINE void finish_panel(const Work &work, int64_t output, int64_t row, int64_t first, int64_t rows,
                            PanelSums &sums) {
    const bool grouped = are_integers<kind> && work.groups > 1;
    float bias[kPanelOutputs] = {};
    for (int64_t n = 0; n < kPanelOutputs && work.bias != nullptr; ++n)
        bias[n] = number_at(work.bias, work.bias_dtype, output + n);
    for (int64_t r = first; r < rows; ++r) {
        float totals[kPanelOutputs];
        sums_of_outputs(sums[r], are_integers<kind> && !grouped, totals);
        const float of_row = are_integers<kind> ? work.input_scales[row + r] : 1.0f;
        if (are_integers<kind> && grouped) {
            DS_IVDEP for (int64_t n = 0; n < kPanelOutputs; ++n) totals[n] *= of_row;
        } else if (are_integers<kind>) {
            DS_IVDEP for (int64_t n = 0; n < kPanelOutputs; ++n) totals[n] *= work.scales[output + n] * of_row;
        }
        DS_IVDEP for (int64_t n = 0; n < kPanelOutputs; ++n) totals[n] += bias[n];
        char *target = work.output + ((row + r) * work.output_stride + output) * ds::item_size(work.output_dtype);
        ds::narrow(target, work.output_dtype, totals, kPanelOutputs);
    }
}

template <int32_t kind>
DS_INLINE void panel(const Work &work, int64_t output, int64_t row, int64_t rows, int64_t chunk, int64_t length,
                     PanelSums &sums) {
    constexpr int64_t N = kPanelTile, R = DS_DOT == 4 && are_integers<kind> ? 2 : 4;
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
    if (work.rows <= kPanelTile) return 0;
    if (are_integers<kind> && work.groups > 1) return work.group * 2 <= kChunkOfIntegers ? work.group * 2 : 0;
    if (are_integers<kind> && work.group > kExactColumns) return 0;
    // whole lines, of which every part of the lanes has its share
    constexpr int64_t run = kind == DS_WEIGHTS_INT8 ? 128 : kind == DS_WEIGHTS_INT4 ? 256 : kLine;
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
