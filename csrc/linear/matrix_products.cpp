// Products of fp32 matrices whose rows and columns may lie either way, as training a layer needs them.
//
// Results are cut into tasks of some rows and columns. A task goes through the depth in blocks: it lays its part of the
// second matrix as panels of kWide columns (K. Goto, R. van de Geijn: Anatomy of high-performance matrix multiplication,
// 2008), then computes kTall rows times one panel at a time, in registers. A number's sum depends on the depth alone: not on
// the task that it belongs to, nor on the number of threads. Products and sums are rounded apart, as everywhere in this
// library; processors with pipes for either lose no time by it.
#include <algorithm>
#include <memory>

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif

#include "lanes.h"
#include "transpose.h"

namespace {

#if defined(__GNUC__)

using ds::kLanes;
using ds::Lanes;
using ds::load;
using ds::store;

constexpr int64_t kTall = 8;                 // rows of a tile
constexpr int64_t kAcross = 3;               // vectors of columns of a tile
constexpr int64_t kWide = kAcross * kLanes;  // columns of a panel
constexpr int64_t kDepth = 192;              // at most, of a block: a panel of it fits the first-level cache
constexpr int64_t kRows = 384;               // at most, of a task
constexpr int64_t kColumns = 8 * kWide;      // at most, of a task: with the rows they fit the second-level cache

using Call = ds_matrix_product;

struct Scratch {
    alignas(64) float panels[kColumns * kDepth];
    alignas(64) float rows[kRows * kDepth];
};

// Of `count` units, where share `i` of `shares` begins.
inline int64_t edge(int64_t count, int64_t shares, int64_t i) { return count * i / shares; }

inline int64_t parts(int64_t n, int64_t most) { return (n + most - 1) / most; }

// ---- laying ---------------------------------------------------------------------------------------------------------

// Columns [column, column + 48) of `depth` steps from `step` on as a panel [depth][48], zeros where the matrix has none.
DS_INLINE void lay_panel(const Call &call, int64_t step, int64_t depth, int64_t column, float *panel) {
    const int64_t columns = std::min(kWide, call.columns - column);
    const float *from = call.b + step * call.b_step + column * call.b_column;
    if (call.b_column == 1) {
        for (int64_t k = 0; k < depth; ++k) {
            float *to = panel + k * kWide;
            std::memcpy(to, from + k * call.b_step, size_t(columns) * sizeof(float));
            std::fill(to + columns, to + kWide, 0.0f);
        }
        return;
    }
    for (int64_t c = 0; c < kWide; c += kLanes) {
        int64_t k = 0;
        if (c + kLanes <= columns && call.b_step == 1)  // as the weights of a layer lie
            for (; k + kLanes <= depth; k += kLanes) {
                Lanes part[kLanes];
                for (int64_t i = 0; i < kLanes; ++i) load(part[i], from + (c + i) * call.b_column + k);
                ds::transpose(part);
                for (int64_t i = 0; i < kLanes; ++i) store(panel + (k + i) * kWide + c, part[i]);
            }
        for (; k < depth; ++k)
            for (int64_t i = c; i < c + kLanes; ++i)
                panel[k * kWide + i] = i < columns ? from[i * call.b_column + k * call.b_step] : 0.0f;
    }
}

// Rows [row, row + count) of the first matrix, kTall beside each other: [count / kTall][depth][kTall].
DS_INLINE void lay_rows(const Call &call, int64_t row, int64_t count, int64_t step, int64_t depth, float *to) {
    for (int64_t r = 0; r < count; r += kTall) {
        const int64_t rows = std::min(kTall, count - r);
        const float *from = call.a + (row + r) * call.a_row + step * call.a_step;
        float *own = to + r * depth;
        if (call.a_row == 1 && rows == kTall) {
            for (int64_t k = 0; k < depth; ++k) std::memcpy(own + k * kTall, from + k * call.a_step, kTall * sizeof(float));
            continue;
        }
        for (int64_t k = 0; k < depth; ++k)
            for (int64_t i = 0; i < kTall; ++i)
                own[k * kTall + i] = i < rows ? from[i * call.a_row + k * call.a_step] : 0.0f;
    }
}

// ---- tiles ----------------------------------------------------------------------------------------------------------

// to[r][0..48) (+)= sum over k of a[r * row + k * step] * panel[k], the sum by itself first.
template <int64_t R, int64_t C>
DS_INLINE void add_columns(const float *a, int64_t row, int64_t step, const float *panel, int64_t depth, float *to,
                           int64_t to_row, bool add) {
    Lanes sums[R][C] = {};
    for (int64_t k = 0; k < depth; ++k) {
        Lanes columns[C];
        for (int64_t c = 0; c < C; ++c) load(columns[c], panel + k * kWide + c * kLanes);
        for (int64_t r = 0; r < R; ++r) {
            const float factor = a[r * row + k * step];
            for (int64_t c = 0; c < C; ++c) sums[r][c] += factor * columns[c];
        }
    }
    for (int64_t r = 0; r < R; ++r)
        for (int64_t c = 0; c < C; ++c) {
            float *own = to + r * to_row + c * kLanes;
            if (add) {
                Lanes before;
                load(before, own);
                sums[r][c] += before;
            }
            store(own, sums[r][c]);
        }
}

template <int64_t R, int64_t C>
DS_INLINE void tile_of(const float *a, int64_t row, int64_t step, const float *panel, int64_t depth, float *to,
                       int64_t to_row, bool add) {
    for (int64_t c = 0; c < kAcross; c += C)
        add_columns<R, C>(a, row, step, panel + c * kLanes, depth, to + c * kLanes, to_row, add);
}

template <int64_t R, int64_t C>
DS_INLINE void tile(const float *a, int64_t row, int64_t step, const float *panel, int64_t depth, float *to,
                    int64_t to_row, int64_t rows, bool add) {
    int64_t r = 0;
    for (; r + R <= rows; r += R) tile_of<R, C>(a + r * row, row, step, panel, depth, to + r * to_row, to_row, add);
    for (; r < rows; ++r) tile_of<1, C>(a + r * row, row, step, panel, depth, to + r * to_row, to_row, add);
}

template <int64_t R, int64_t C>
DS_INLINE void task(const Call &call, Scratch &scratch, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    const int64_t blocks = parts(call.depth, kDepth);
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t step = edge(call.depth, blocks, block), depth = edge(call.depth, blocks, block + 1) - step;
        const bool add = block > 0, laid = call.a_step != 1;
        for (int64_t c = 0; c < columns; c += kWide)
            lay_panel(call, step, depth, column + c, scratch.panels + c * depth);
        if (laid) lay_rows(call, row, rows, step, depth, scratch.rows);
        for (int64_t c = 0; c < columns; c += kWide) {
            const float *panel = scratch.panels + c * depth;
            const bool whole = c + kWide <= columns;
            for (int64_t r = 0; r < rows; r += kTall) {
                const int64_t here = std::min(kTall, rows - r), from = row + r;
                float *target = call.c + from * call.c_row + column + c, *to = target;
                int64_t to_row = call.c_row;
                alignas(64) float edge_tile[kTall * kWide];
                if (!whole) {  // by way of a tile that has all columns
                    to = edge_tile, to_row = kWide;
                    for (int64_t i = 0; i < here && add; ++i)
                        std::memcpy(to + i * kWide, target + i * call.c_row, size_t(columns - c) * sizeof(float));
                }
                if (laid)
                    tile<R, C>(scratch.rows + r * depth, 1, kTall, panel, depth, to, to_row, here, add);
                else
                    tile<R, C>(call.a + from * call.a_row + step, call.a_row, 1, panel, depth, to, to_row, here, add);
                for (int64_t i = 0; i < here && !whole; ++i)
                    std::memcpy(target + i * call.c_row, to + i * kWide, size_t(columns - c) * sizeof(float));
            }
        }
    }
    if (call.bias == nullptr) return;
    for (int64_t r = row; r < row + rows; ++r) {
        float *__restrict to = call.c + r * call.c_row + column;
        const float *__restrict bias = call.bias + column;
        DS_IVDEP for (int64_t c = 0; c < columns; ++c) to[c] = to[c] + bias[c];
    }
}

// Tiles as registers hold them.
#if defined(__x86_64__)
__attribute__((target("arch=x86-64-v4,prefer-vector-width=512"))) void task_avx512(
    const Call &call, Scratch &scratch, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    task<kTall, kAcross>(call, scratch, row, rows, column, columns);
}
__attribute__((target("arch=x86-64-v3"))) void task_avx2(const Call &call, Scratch &scratch, int64_t row, int64_t rows,
                                                         int64_t column, int64_t columns) {
    task<4, 1>(call, scratch, row, rows, column, columns);
}
#endif
void task_plain(const Call &call, Scratch &scratch, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    task<2, 1>(call, scratch, row, rows, column, columns);
}

void run_task(const Call &call, Scratch &scratch, int64_t row, int64_t rows, int64_t column, int64_t columns) {
#if defined(__x86_64__)
    if (ds_isa() == 2) return task_avx512(call, scratch, row, rows, column, columns);
    if (ds_isa() == 1) return task_avx2(call, scratch, row, rows, column, columns);
#endif
    task_plain(call, scratch, row, rows, column, columns);
}

// Of one thread, kept from call to call: pages of new memory would cost more than laying.
Scratch &own_scratch() {
    thread_local std::unique_ptr<Scratch> scratch;
    if (!scratch) scratch.reset(new Scratch);
    return *scratch;
}

#if defined(__x86_64__)
// AMD's processors from family 26 (Zen 5) on: two multiplications and two additions of 512 bits at a time.
bool is_wide_amd() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (!__builtin_cpu_is("amd") || !__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return false;
    return ((eax >> 8) & 15) + ((eax >> 20) & 255) >= 26;
}
#endif

#endif  // __GNUC__

}  // namespace

#if defined(__GNUC__)

int32_t ds_matrix_product_is_fast(void) {
#if defined(__x86_64__)
    static const bool wide = is_wide_amd();
    return ds_isa() == 2 && wide;
#else
    return 0;
#endif
}

int32_t ds_matrix_product_run(const ds_matrix_product *call, int32_t threads) {
    const int64_t units = parts(call->rows, kTall), panels = parts(call->columns, kWide);
    const int64_t down = parts(call->rows, kRows), across = parts(panels, kColumns / kWide);
    const int64_t tasks = down * across;
#pragma omp parallel for num_threads(std::max(threads, 1)) schedule(dynamic, 1)
    for (int64_t i = 0; i < tasks; ++i) {
        const int64_t row = edge(units, down, i % down) * kTall, column = edge(panels, across, i / down) * kWide;
        const int64_t row_end = std::min(edge(units, down, i % down + 1) * kTall, call->rows);
        const int64_t column_end = std::min(edge(panels, across, i / down + 1) * kWide, call->columns);
        run_task(*call, own_scratch(), row, row_end - row, column, column_end - column);
    }
    return 1;
}

#else

int32_t ds_matrix_product_is_fast(void) { return 0; }
int32_t ds_matrix_product_run(const ds_matrix_product *, int32_t) { return 0; }

#endif
