// Panels of floats (see [Note: panels]). Included by panels.h.
//
// [Note: lines in order] Of lines that a thread asks for, a processor has some two dozen on their way at a time, which is a
// third of what memory gives; the rest comes from what it fetches by itself behind lines that are asked for in order. Rows
// beside each other are no such order unless they are long. So the weights that come next are asked for line by line as they
// lie in the memory, into the second level of the cache, evenly all the while: at a pause the processor stops too.

constexpr int64_t kInputBytes = 16 << 10;  // of a chunk of all rows, about

// R rows times kPanelTile rows of the matrix, bytes [begin, end). `ask`: from where on `asked` lines are asked for with each
// step.
template <int64_t R, int64_t asked, int32_t kind>
DS_INLINE void add_panel(const Work &work, const char *matrix, const char *inputs, const char *ask, int64_t begin,
                         int64_t end, float *to) {
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
        DS_UNROLL for (int64_t i = 0; i < asked; ++i, ask += kLine) __builtin_prefetch(ask, 0, 2);
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
    DS_UNROLL for (int64_t r = 0; r < R; ++r)
        DS_UNROLL for (int64_t n = 0; n < N; ++n) ds::store(at(to, r, n), sums[r][n]);
}

// Asks for `left` bytes while it computes, from `ask` on, which goes on with them: about as many in each of `tiles`.
template <int64_t R, int32_t kind>
DS_INLINE void add_asking(const Work &work, const char *matrix, const char *inputs, const char *&ask, const char *ask_end,
                          int64_t tiles, int64_t begin, int64_t end, float *to) {
    const int64_t steps = (end - begin) / int64_t(sizeof(Words)), lines = (ask_end - ask) / kLine;
    const int64_t wanted = lines > 0 ? (lines + steps * tiles - 1) / (steps * tiles) : 0;
    const auto add = [&](auto asked) {
        add_panel<R, decltype(asked)::value, kind>(work, matrix, inputs, ask, begin, end, to);
        ask += steps * decltype(asked)::value * kLine;
    };
    if (wanted == 0) return add(std::integral_constant<int64_t, 0>());
    if (wanted == 1) return add(std::integral_constant<int64_t, 1>());
    if (wanted == 2) return add(std::integral_constant<int64_t, 2>());
    add(std::integral_constant<int64_t, 4>());
}

// Bytes of inputs of a chunk: about equal ones, of whole vectors.
static int64_t float_chunk(int64_t length, int64_t rows) {
    constexpr int64_t vector = sizeof(Words);
    const int64_t most = std::max(kInputBytes / rows, vector), chunks = (length + most - 1) / most;
    return (length / vector + chunks - 1) / chunks * vector;
}

template <int32_t kind>
DS_INLINE void float_panel(const Work &work, int64_t output, int64_t row, int64_t rows, int64_t chunk,
                           int64_t length, PanelSums &sums) {
    constexpr int64_t N = kPanelTile, R = DS_DOT < 3 ? 2 : 4;
    const char *inputs = work.inputs + row * work.input_bytes, *panel = work.matrix + output * work.row_bytes;
    const char *ask = panel + kPanelOutputs * work.row_bytes, *ask_end = row > 0 ? ask : ask + kPanelOutputs * work.row_bytes;
    const int64_t in_chunk = rows / R + (rows % R != 0);
    int64_t tiles = (length + chunk - 1) / chunk * (kPanelOutputs / N) * in_chunk;
    for (int64_t begin = 0; begin < length; begin += chunk) {
        const int64_t end = begin + chunk < length ? begin + chunk : length;
        for (int64_t n = 0; n < kPanelOutputs; n += N) {
            const char *matrix = panel + n * work.row_bytes;
            const auto add = [&](auto count, int64_t r) {
                add_asking<decltype(count)::value, kind>(work, matrix, inputs + r * work.input_bytes, ask, ask_end, tiles--,
                                                         begin, end, sums[r][n]);
            };
            int64_t r = 0;
            for (; r + R <= rows; r += R) add(std::integral_constant<int64_t, R>(), r);
            if constexpr (R == 4) {
                if (rows - r == 3) add(std::integral_constant<int64_t, 3>(), r);
                if (rows - r == 2) add(std::integral_constant<int64_t, 2>(), r);
            }
            if (rows - r == 1) add(std::integral_constant<int64_t, 1>(), r);
        }
    }
    finish_panel<kind>(work, output, row, rows, sums);
}
