// Self-attention in the blocks of a layout, forward and backward: the matrix of scores never exists.
//
// A work item takes kRows queries of one head and walks the blocks that they see in chunks (T. Dao et al.:
// FlashAttention, 2022): scores of a chunk, weights from the largest score so far, sums of values. Backward computes the
// weights again from the log-sum-exp; it adds to the gradients of keys and values in memory, so a head, or one of a fixed
// number of `parts` of its rows, is one item there. No result depends on how items are divided among threads.
//
// Keys are transposed first, 16 tokens beside each other (values too, for backward): scores of 16 keys are then one chain
// of additions per lane, as in lanes.h, and every product is one of two small kernels on registers.
#include <algorithm>
#include <cmath>
#include <limits>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "exponential.h"
#include "lanes.h"

namespace {

#if defined(__GNUC__)

using ds::exponential;
using ds::kLanes;
using ds::Lanes;
using ds::load;
using ds::store;

constexpr int64_t kRows = 16;    // queries of an item, and keys of a panel
constexpr int64_t kChunk = 256;  // keys that are computed together
constexpr int64_t kMost = 256;   // largest size of a head
constexpr float kNone = -std::numeric_limits<float>::infinity();

using Call = ds_sparse_attention;

// ---- small products -------------------------------------------------------------------------------------------------

// out[r][0..16 P) = x[r] times P panels [size][16] of transposed rows.
template <int64_t R, int64_t P>
DS_INLINE void times_panels(const float *x, int64_t size, const float *const *panels, float *out) {
    Lanes sums[R][P] = {};
    for (int64_t t = 0; t < size; ++t) {
        Lanes panel[P];
        for (int64_t p = 0; p < P; ++p) load(panel[p], panels[p] + t * kLanes);
        for (int64_t r = 0; r < R; ++r) {
            const float factor = x[r * size + t];
            for (int64_t p = 0; p < P; ++p) sums[r][p] += factor * panel[p];
        }
    }
    for (int64_t r = 0; r < R; ++r)
        for (int64_t p = 0; p < P; ++p) store(out + r * kChunk + p * kLanes, sums[r][p]);
}

// All rows, `count` panels.
template <int64_t R>
DS_INLINE void scores_of(const float *x, int64_t size, const float *const *panels, int64_t count, float *out) {
    int64_t p = 0;
    for (; p + 2 <= count; p += 2)
        for (int64_t r = 0; r < kRows; r += R)
            times_panels<R, 2>(x + r * size, size, panels + p, out + r * kChunk + p * kLanes);
    if (p < count)
        for (int64_t r = 0; r < kRows; r += R)
            times_panels<R, 1>(x + r * size, size, panels + p, out + r * kChunk + p * kLanes);
}

// sums[r][c] += weights[r][k] * rows[k][c] over `count` blocks of 16 rows, for R rows and C lanes of columns.
template <int64_t R, int64_t C>
DS_INLINE void add_rows(float *sums, int64_t size, const float *weights, int64_t across, int64_t along,
                        const float *const *rows, int64_t column, int64_t count) {
    Lanes total[R][C];
    for (int64_t r = 0; r < R; ++r)
        for (int64_t c = 0; c < C; ++c) load(total[r][c], sums + r * size + column + c * kLanes);
    for (int64_t b = 0; b < count; ++b) {
        const float *from = rows[b] + column;
        const float *w = weights + b * kRows * along;
        for (int64_t k = 0; k < kRows; ++k) {
            Lanes row[C];
            for (int64_t c = 0; c < C; ++c) load(row[c], from + k * size + c * kLanes);
            for (int64_t r = 0; r < R; ++r) {
                const float factor = w[r * across + k * along];
                for (int64_t c = 0; c < C; ++c) total[r][c] += factor * row[c];
            }
        }
    }
    for (int64_t r = 0; r < R; ++r)
        for (int64_t c = 0; c < C; ++c) store(sums + r * size + column + c * kLanes, total[r][c]);
}

// 16 rows of sums. A weight of row r and element k is at weights[r * across + k * along].
template <int64_t R>
DS_INLINE void add_products(float *sums, int64_t size, const float *weights, int64_t across, int64_t along,
                            const float *const *rows, int64_t count) {
    for (int64_t r = 0; r < kRows; r += R) {
        float *own = sums + r * size;
        const float *w = weights + r * across;
        int64_t c = 0;
        for (; c + 4 * kLanes <= size; c += 4 * kLanes) add_rows<R, 4>(own, size, w, across, along, rows, c, count);
        for (; c < size; c += kLanes) add_rows<R, 1>(own, size, w, across, along, rows, c, count);
    }
}

// ---- tensors --------------------------------------------------------------------------------------------------------

DS_INLINE const float *wide_rows(const Call &call, const void *tensor, int64_t at, float *buffer) {
    return ds::widen(ds::at(tensor, at, call.dtype), call.dtype, buffer, kRows * call.size);
}

// 16 tokens from `first` on, as a panel at token `to` of `panels`.
DS_INLINE void transpose(const Call &call, const void *tensor, float *panels, int64_t first, int64_t to) {
    alignas(64) float buffer[kRows * kMost];
    const float *rows = wide_rows(call, tensor, first * call.size, buffer);
    float *panel = panels + to * call.size;
    for (int64_t t = 0; t < call.size; ++t)
        for (int64_t j = 0; j < kRows; ++j) panel[t * kLanes + j] = rows[j * call.size + t];
}

// ---- what an item sees ----------------------------------------------------------------------------------------------

struct Item {
    int64_t head;   // of batch and heads
    int64_t row;    // first query
    int64_t entry;  // position among the blocks of its row of the layout
    int64_t inner;  // tokens of that block that are done
};

DS_INLINE const int64_t *starts_of(const Call &call, int64_t head) {
    return call.starts + call.layout_of[head % call.heads] * (call.tokens / call.block + 1);
}

// The next keys that an item sees, by their first token, up to kChunk tokens; how many panels.
DS_INLINE int64_t next_panels(const Call &call, Item &item, int64_t *tokens) {
    const int64_t *starts = starts_of(call, item.head);
    const int64_t stop = starts[item.row / call.block + 1];
    int64_t found = 0;
    while (item.entry < stop && found < kChunk / kRows) {
        const int64_t token = call.columns[item.entry] * call.block + item.inner;
        item.inner += kRows;
        if (item.inner == call.block) {
            item.inner = 0;
            ++item.entry;
        }
        if (!call.causal || token <= item.row) tokens[found++] = token;
    }
    return found;
}

DS_INLINE Item item_at(const Call &call, int64_t head, int64_t row) {
    return {head, row, starts_of(call, head)[row / call.block], 0};
}

// scores[r][j] = products * scale + masks.
DS_INLINE void add_masks(const Call &call, const Item &item, const int64_t *tokens, int64_t count, float *scores) {
    const float scale = call.scale;
    for (int64_t r = 0; r < kRows; ++r) {
        float *__restrict own = scores + r * kChunk;
        DS_IVDEP for (int64_t j = 0; j < count * kRows; ++j) own[j] = own[j] * scale;
    }
    if (call.key_bias == nullptr && call.score_bias == nullptr && !call.causal) return;
    for (int64_t p = 0; p < count; ++p)
        for (int64_t r = 0; r < kRows; ++r) {
            float *__restrict own = scores + r * kChunk + p * kRows;
            if (call.score_bias != nullptr) {
                const float *__restrict bias = call.score_bias + (item.row + r) * call.tokens + tokens[p];
                DS_IVDEP for (int64_t j = 0; j < kRows; ++j) own[j] = own[j] + bias[j];
            }
            if (call.key_bias != nullptr) {
                const float *__restrict bias = call.key_bias + (item.head / call.heads) * call.tokens + tokens[p];
                DS_IVDEP for (int64_t j = 0; j < kRows; ++j) own[j] = own[j] + bias[j];
            }
            if (call.causal && tokens[p] == item.row)
                for (int64_t j = r + 1; j < kRows; ++j) own[j] = kNone;
        }
}

// The largest of n = 16 k numbers.
DS_INLINE float largest(const float *values, int64_t n) {
    float lanes[kLanes];
    for (int64_t j = 0; j < kLanes; ++j) lanes[j] = values[j];
    for (int64_t i = kLanes; i < n; i += kLanes)
        DS_IVDEP for (int64_t j = 0; j < kLanes; ++j)
            lanes[j] = values[i + j] > lanes[j] ? values[i + j] : lanes[j];
    float found = lanes[0];
    for (int64_t j = 1; j < kLanes; ++j) found = lanes[j] > found ? lanes[j] : found;
    return found;
}

DS_INLINE float sum_of(const float *values, int64_t n) {
    Lanes total = {};
    for (int64_t i = 0; i < n; i += kLanes) {
        Lanes more;
        load(more, values + i);
        total += more;
    }
    return ds::sum(total);
}

// ---- forward --------------------------------------------------------------------------------------------------------

template <int64_t R>
DS_INLINE void forward_item(const Call &call, Item item) {
    alignas(64) float query_buffer[kRows * kMost], value_buffer[kRows * kMost];
    alignas(64) float scores[kRows * kChunk], sums[kRows * kMost];
    float most[kRows], total[kRows];
    const int64_t size = call.size, base = item.head * call.tokens;
    const bool narrow = call.dtype != DS_FLOAT32;
    const float *query = wide_rows(call, call.query, (base + item.row) * size, query_buffer);
    std::fill(most, most + kRows, kNone);
    std::fill(total, total + kRows, 0.0f);
    std::fill(sums, sums + kRows * size, 0.0f);
    int64_t tokens[kChunk / kRows];
    const float *panels[kChunk / kRows], *rows[kChunk / kRows];
    const int64_t *starts = starts_of(call, item.head);
    const int64_t stop = starts[item.row / call.block + 1];
    while (item.entry < stop) {
        const int64_t count = next_panels(call, item, tokens);
        if (count == 0) break;
        for (int64_t p = 0; p < count; ++p) {
            panels[p] = call.keys + (base + tokens[p]) * size;
            rows[p] = static_cast<const float *>(ds::at(call.value, (base + tokens[p]) * size, call.dtype));
        }
        scores_of<R>(query, size, panels, count, scores);
        add_masks(call, item, tokens, count, scores);
        const int64_t n = count * kRows;
        for (int64_t r = 0; r < kRows; ++r) {
            float *__restrict own = scores + r * kChunk;
            const float found = largest(own, n), new_most = found > most[r] ? found : most[r];
            const float anchor = new_most == kNone ? 0.0f : new_most;
            DS_IVDEP for (int64_t j = 0; j < n; ++j) own[j] = exponential(own[j] - anchor);
            if (new_most != most[r]) {
                const float kept = exponential(most[r] - anchor);
                total[r] = total[r] * kept;
                float *__restrict sum = sums + r * size;
                DS_IVDEP for (int64_t c = 0; c < size; ++c) sum[c] = sum[c] * kept;
                most[r] = new_most;
            }
            total[r] = total[r] + sum_of(own, n);
        }
        if (!narrow) {
            add_products<R / 2>(sums, size, scores, kChunk, 1, rows, count);
            continue;
        }
        for (int64_t p = 0; p < count; ++p) {
            const float *own = wide_rows(call, call.value, (base + tokens[p]) * size, value_buffer);
            add_products<R / 2>(sums, size, scores + p * kRows, kChunk, 1, &own, 1);
        }
    }
    for (int64_t r = 0; r < kRows; ++r) {
        const float factor = total[r] > 0.0f ? 1.0f / total[r] : 0.0f;
        float *__restrict sum = sums + r * size;
        DS_IVDEP for (int64_t c = 0; c < size; ++c) sum[c] = sum[c] * factor;
        call.lse[base + item.row + r] = total[r] > 0.0f ? most[r] + float(std::log(double(total[r]))) : kNone;
    }
    void *to = ds::at(call.output, (base + item.row) * size, call.dtype);
    if (narrow)
        ds::narrow(to, call.dtype, sums, kRows * size);
    else
        std::memcpy(to, sums, size_t(kRows * size) * sizeof(float));
}

// ---- backward -------------------------------------------------------------------------------------------------------

// sums[r] += weights[k][r] * rows[k] for the 16 keys r of a panel and the 16 queries k of an item.
template <int64_t R>
DS_INLINE void add_to_keys(float *sums, int64_t size, const float *weights, const float *rows) {
    add_products<R>(sums, size, weights, 1, kChunk, &rows, 1);
}

// Keys and values of the head in hand, transposed, and the sums for their gradients: [tokens][size] each.
struct Head {
    float *keys, *values, *key_sums, *value_sums;
};

template <int64_t R>
DS_INLINE void backward_item(const Call &call, Item item, const Head &head) {
    alignas(64) float query_buffer[kRows * kMost], grad_buffer[kRows * kMost], key_buffer[kRows * kMost];
    alignas(64) float weights[kRows * kChunk], slopes[kRows * kChunk], sums[kRows * kMost];
    float anchor[kRows], inner[kRows];
    const int64_t size = call.size, base = item.head * call.tokens, at = (base + item.row) * size;
    const bool narrow = call.dtype != DS_FLOAT32;
    const float *grad = wide_rows(call, call.grad_output, at, grad_buffer);
    const float *output = wide_rows(call, call.output, at, key_buffer);
    for (int64_t r = 0; r < kRows; ++r) {
        Lanes dot = {};
        for (int64_t c = 0; c < size; c += kLanes) {
            Lanes one, other;
            load(one, grad + r * size + c);
            load(other, output + r * size + c);
            dot += one * other;
        }
        inner[r] = ds::sum(dot);
        const float lse = call.lse[base + item.row + r];
        anchor[r] = lse == kNone ? 0.0f : lse;
    }
    const float *query = wide_rows(call, call.query, at, query_buffer);
    std::fill(sums, sums + kRows * size, 0.0f);
    int64_t tokens[kChunk / kRows];
    const float *panels[kChunk / kRows], *value_panels[kChunk / kRows], *rows[kChunk / kRows];
    const int64_t *starts = starts_of(call, item.head);
    const int64_t stop = starts[item.row / call.block + 1];
    while (item.entry < stop) {
        const int64_t count = next_panels(call, item, tokens);
        if (count == 0) break;
        for (int64_t p = 0; p < count; ++p) {
            panels[p] = head.keys + tokens[p] * size;
            value_panels[p] = head.values + tokens[p] * size;
            rows[p] = static_cast<const float *>(ds::at(call.key, (base + tokens[p]) * size, call.dtype));
        }
        scores_of<R>(query, size, panels, count, weights);
        add_masks(call, item, tokens, count, weights);
        scores_of<R>(grad, size, value_panels, count, slopes);
        for (int64_t r = 0; r < kRows; ++r) {
            float *__restrict weight = weights + r * kChunk, *__restrict slope = slopes + r * kChunk;
            const float shift = anchor[r], mean = inner[r], scale = call.scale;
            DS_IVDEP for (int64_t j = 0; j < count * kRows; ++j) {
                const float score = weight[j] - shift;
                const float w = exponential(score > 0.0f ? 0.0f : score);
                weight[j] = w;
                slope[j] = (w * (slope[j] - mean)) * scale;
            }
        }
        for (int64_t p = 0; p < count; ++p) {
            const int64_t to = tokens[p] * size;
            add_to_keys<R / 2>(head.value_sums + to, size, weights + p * kRows, grad);
            add_to_keys<R / 2>(head.key_sums + to, size, slopes + p * kRows, query);
            if (narrow) {
                const float *own = wide_rows(call, call.key, base * size + to, key_buffer);
                add_products<R / 2>(sums, size, slopes + p * kRows, kChunk, 1, &own, 1);
            }
        }
        if (!narrow) add_products<R / 2>(sums, size, slopes, kChunk, 1, rows, count);
    }
    void *to = ds::at(call.grad_query, at, call.dtype);
    if (narrow)
        ds::narrow(to, call.dtype, sums, kRows * size);
    else
        std::memcpy(to, sums, size_t(kRows * size) * sizeof(float));
}

// Rows [first, last) of part `part` of a head: about equal numbers of blocks.
inline int64_t edge_of(const Call &call, int64_t head, int64_t part) {
    const int64_t rows = call.tokens / call.block, *starts = starts_of(call, head);
    if (part == call.parts) return call.tokens;
    const int64_t wanted = starts[0] + (starts[rows] - starts[0]) * part / call.parts;
    return (std::lower_bound(starts, starts + rows, wanted) - starts) * call.block;
}

template <int64_t R>
DS_INLINE void backward_head(const Call &call, int64_t head, int64_t part, int64_t thread) {
    const int64_t numel = call.tokens * call.size, sums = (part * call.batch * call.heads + head) * numel;
    const Head own = {call.keys + thread * numel, call.values + thread * numel, call.key_sums + sums,
                      call.value_sums + sums};
    for (int64_t token = 0; token < call.tokens; token += kRows) {
        transpose(call, call.key, own.keys, head * call.tokens + token, token);
        transpose(call, call.value, own.values, head * call.tokens + token, token);
    }
    std::memset(own.key_sums, 0, size_t(numel) * sizeof(float));
    std::memset(own.value_sums, 0, size_t(numel) * sizeof(float));
    const int64_t first = edge_of(call, head, part), last = edge_of(call, head, part + 1);
    for (int64_t row = first; row < last; row += kRows)
        backward_item<R>(call, item_at(call, head, row), own);
}

// ---- instruction sets -----------------------------------------------------------------------------------------------

// Rows of a small product: as many as registers hold. How many makes no difference to a sum.
#if defined(__x86_64__)
#define DS_BY_REGISTERS(name, parameters, arguments)                                                          \
    __attribute__((target("arch=x86-64-v4,prefer-vector-width=512"))) static void name##_avx512 parameters { \
        name<8> arguments;                                                                                  \
    }                                                                                                       \
    __attribute__((target("arch=x86-64-v3"))) static void name##_avx2 parameters { name<2> arguments; }     \
    static void name##_plain parameters { name<2> arguments; }                                              \
    static void name##_any parameters {                                                                     \
        switch (ds_isa()) {                                                                                 \
            case 2: return name##_avx512 arguments;                                                         \
            case 1: return name##_avx2 arguments;                                                           \
            default: return name##_plain arguments;                                                         \
        }                                                                                                   \
    }
#else
#define DS_BY_REGISTERS(name, parameters, arguments) \
    static void name##_any parameters { name<4> arguments; }
#endif

DS_BY_REGISTERS(forward_item, (const Call &call, Item item), (call, item))
DS_BY_REGISTERS(backward_head, (const Call &call, int64_t head, int64_t part, int64_t thread),
                (call, head, part, thread))

DS_INLINE void transpose_run_body(const Call &call, const void *tensor, float *panels, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) transpose(call, tensor, panels, i * kRows, i * kRows);
}

DS_KERNEL(transpose_run, (const Call &call, const void *tensor, float *panels, int64_t first, int64_t last),
          (call, tensor, panels, first, last))

void transpose_all(const Call &call, const void *tensor, float *panels, int threads) {
    const int64_t count = call.batch * call.heads * call.tokens / kRows;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int t = 0; t < threads; ++t)
        transpose_run(call, tensor, panels, count * t / threads, count * (t + 1) / threads);
}

int64_t this_thread() {
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

bool fits(const Call &call) {
    return call.size % kLanes == 0 && call.size <= kMost && call.block % kRows == 0 && call.tokens % call.block == 0;
}

DS_INLINE void join_run_body(const Call &call, float *sums, void *output, int64_t first, int64_t last) {
    const int64_t numel = call.batch * call.heads * call.tokens * call.size;
    for (int64_t i = first; i < last; i += ds::kBlock) {
        const int64_t n = last - i < ds::kBlock ? last - i : ds::kBlock;
        float *__restrict total = sums + i;
        for (int64_t part = 1; part < call.parts; ++part) {
            const float *__restrict more = sums + part * numel + i;
            DS_IVDEP for (int64_t j = 0; j < n; ++j) total[j] = total[j] + more[j];
        }
        ds::narrow(ds::at(output, i, call.dtype), call.dtype, total, n);
    }
}

DS_KERNEL(join_run, (const Call &call, float *sums, void *output, int64_t first, int64_t last),
          (call, sums, output, first, last))

#endif  // __GNUC__

}  // namespace

#if defined(__GNUC__)

int32_t ds_sparse_attention_forward(const ds_sparse_attention *call, int32_t threads) {
    if (!fits(*call)) return 0;
    if (threads < 1) threads = 1;
    transpose_all(*call, call->key, call->keys, threads);
    const int64_t per_head = call->tokens / kRows, count = call->batch * call->heads * per_head;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
    for (int64_t i = 0; i < count; ++i)
        forward_item_any(*call, item_at(*call, i / per_head, i % per_head * kRows));
    return 1;
}

int32_t ds_sparse_attention_backward(const ds_sparse_attention *call, int32_t threads) {
    if (!fits(*call)) return 0;
    if (threads < 1) threads = 1;
    const int64_t count = call->batch * call->heads * call->parts;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t i = 0; i < count; ++i) backward_head_any(*call, i / call->parts, i % call->parts, this_thread());
    const int64_t numel = call->batch * call->heads * call->tokens * call->size;
    ds::for_each_run(
        2, threads, [&](int64_t) { return numel; },
        [&](int64_t which, int64_t begin, int64_t end) {
            if (which == 0)
                join_run(*call, call->key_sums, call->grad_key, begin, end);
            else
                join_run(*call, call->value_sums, call->grad_value, begin, end);
        });
    return 1;
}

#else

int32_t ds_sparse_attention_forward(const ds_sparse_attention *, int32_t) { return 0; }
int32_t ds_sparse_attention_backward(const ds_sparse_attention *, int32_t) { return 0; }

#endif
