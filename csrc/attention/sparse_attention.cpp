// Self-attention in the blocks of a layout, forward and backward: the matrix of scores never exists.
//
// A work item takes kRows queries of one head and walks the blocks that they see in chunks (T. Dao et al.:
// FlashAttention, 2022): scores of a chunk, weights from the largest score so far, sums of values. Backward computes the
// weights again from the log-sum-exp; it adds to the gradients of keys and values in memory, so a head, or one of a fixed
// number of `parts` of its rows, is one item there. No result depends on how items are divided among threads.
//
// Scores are transposed: a vector holds those of one key with all queries of the item. So the only rows that have to be
// transposed are the item's own, softmax needs no sum across a vector, and keys and values are read where they lie, one
// number for all lanes at a time. Every sum is one chain of additions per lane, as in lanes.h.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "exponential.h"
#include "lanes.h"
#include "large_pages.h"
#include "transpose.h"

namespace {

#if defined(__GNUC__)

using ds::exponential;
using ds::kLanes;
using ds::LanesOf;

constexpr int64_t kRows = kLanes;  // queries of an item, and keys that are taken at once
constexpr int64_t kChunk = 256;    // keys that are computed together
constexpr int64_t kMost = 256;     // largest size of a head
constexpr float kNone = -std::numeric_limits<float>::infinity();

// Rows of a small product: as many as registers hold. How many makes no difference to a sum.
template <int N>
constexpr int64_t kTogether = N == 16 ? 16 : 4;

using Call = ds_sparse_attention;

// ---- small products -------------------------------------------------------------------------------------------------

// out[k] = rows[k] times the panel [size][16] of transposed queries, for 16 keys k.
template <int N, int64_t R>
DS_INLINE void times_panel(const float *rows, int64_t size, const float *panel, float *out) {
    for (int64_t k = 0; k < kRows; k += R) {
        const float *own = rows + k * size;
        LanesOf<N> sums[R] = {};
        for (int64_t t = 0; t < size; ++t) {
            LanesOf<N> queries;
            queries.load(panel + t * kLanes);
            DS_UNROLL for (int64_t r = 0; r < R; ++r) sums[r].add_product(own[r * size + t], queries);
        }
        DS_UNROLL for (int64_t r = 0; r < R; ++r) sums[r].store(out + (k + r) * kLanes);
    }
}

// sums[r][c] += weights[r][k] * rows[k][c] over `count` blocks of 16 rows, for R rows and C lanes of columns.
template <int N, int64_t R, int64_t C>
DS_INLINE void add_rows(float *sums, int64_t size, const float *weights, int64_t across, int64_t along,
                        const float *const *rows, int64_t column, int64_t count) {
    LanesOf<N> total[R][C];
    DS_UNROLL for (int64_t r = 0; r < R; ++r)
        DS_UNROLL for (int64_t c = 0; c < C; ++c) total[r][c].load(sums + r * size + column + c * kLanes);
    for (int64_t b = 0; b < count; ++b) {
        const float *from = rows[b] + column;
        const float *w = weights + b * kRows * along;
        for (int64_t k = 0; k < kRows; ++k) {
            LanesOf<N> row[C];
            DS_UNROLL for (int64_t c = 0; c < C; ++c) row[c].load(from + k * size + c * kLanes);
            DS_UNROLL for (int64_t r = 0; r < R; ++r) {
                const float factor = w[r * across + k * along];
                DS_UNROLL for (int64_t c = 0; c < C; ++c) total[r][c].add_product(factor, row[c]);
            }
        }
    }
    DS_UNROLL for (int64_t r = 0; r < R; ++r)
        DS_UNROLL for (int64_t c = 0; c < C; ++c) total[r][c].store(sums + r * size + column + c * kLanes);
}

// 16 rows of sums. A weight of row r and element k is at weights[r * across + k * along].
template <int N, int64_t R>
DS_INLINE void add_products(float *sums, int64_t size, const float *weights, int64_t across, int64_t along,
                            const float *const *rows, int64_t count) {
    for (int64_t r = 0; r < kRows; r += R) {
        float *own = sums + r * size;
        const float *w = weights + r * across;
        int64_t c = 0;
        for (; c + 4 * kLanes <= size; c += 4 * kLanes) add_rows<N, R, 4>(own, size, w, across, along, rows, c, count);
        for (; c < size; c += kLanes) add_rows<N, R, 1>(own, size, w, across, along, rows, c, count);
    }
}

// Queries: sums[q] += weights[k][q] * rows[k] over keys k.
template <int N, int64_t R>
DS_INLINE void add_to_queries(float *sums, int64_t size, const float *weights, const float *const *rows, int64_t count) {
    add_products<N, R>(sums, size, weights, 1, kLanes, rows, count);
}

// 16 keys: sums[k] += weights[k][q] * rows[q] over the item's queries q.
template <int N, int64_t R>
DS_INLINE void add_to_keys(float *sums, int64_t size, const float *weights, const float *rows) {
    add_products<N, R>(sums, size, weights, kLanes, 1, &rows, 1);
}

// ---- rows and panels ------------------------------------------------------------------------------------------------

DS_INLINE const float *wide_rows(const Call &call, const void *tensor, int64_t at, int64_t size, float *buffer) {
    return ds::widen(ds::at(tensor, at, call.dtype), call.dtype, buffer, kRows * size);
}

// 16 rows, times a factor, as a panel [size][16].
template <int N>
DS_INLINE void make_panel(const float *rows, int64_t size, float factor, float *panel) {
    for (int64_t t = 0; t < size; t += kLanes) {
        LanesOf<N> part[kLanes];
        for (int64_t r = 0; r < kLanes; ++r) part[r].load(rows + r * size + t);
        ds::transpose(part);
        for (int64_t i = 0; i < kLanes; ++i) {
            part[i].multiply(factor);
            part[i].store(panel + (t + i) * kLanes);
        }
    }
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

DS_INLINE Item item_at(const Call &call, int64_t head, int64_t row) {
    return {head, row, starts_of(call, head)[row / call.block], 0};
}

// The next keys that an item sees, 16 from each of `tokens` on, at most kChunk; how many times 16. None: that was all.
DS_INLINE int64_t next_keys(const Call &call, Item &item, int64_t *tokens) {
    const int64_t stop = starts_of(call, item.head)[item.row / call.block + 1];
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

// Adds masks to the scores [16 keys][16 queries] of keys from `token` on.
template <int N>
DS_INLINE void add_masks(const Call &call, const Item &item, int64_t token, float *scores) {
    if (call.score_bias != nullptr) {
        LanesOf<N> bias[kLanes];
        for (int64_t q = 0; q < kRows; ++q) bias[q].load(call.score_bias + (item.row + q) * call.tokens + token);
        ds::transpose(bias);
        for (int64_t k = 0; k < kRows; ++k) {
            LanesOf<N> own;
            own.load(scores + k * kLanes);
            own.add(bias[k]);
            own.store(scores + k * kLanes);
        }
    }
    if (call.key_bias != nullptr) {
        const float *bias = call.key_bias + (item.head / call.heads) * call.tokens + token;
        for (int64_t k = 0; k < kRows; ++k) {
            float *__restrict own = scores + k * kLanes;
            const float more = bias[k];
            DS_IVDEP for (int64_t q = 0; q < kRows; ++q) own[q] = own[q] + more;
        }
    }
    if (call.causal && token == item.row)
        for (int64_t k = 1; k < kRows; ++k) std::fill(scores + k * kLanes, scores + k * kLanes + k, kNone);
}

// ---- forward --------------------------------------------------------------------------------------------------------

// Softmax of the queries of an item, chunk by chunk: the largest score, and the sum of the weights, so far.
struct Softmax {
    alignas(64) float most[kRows], total[kRows], kept[kRows];
};

// Scores [n][16] become weights from the largest so far; whether what was summed before has to be multiplied by `kept`.
template <int N>
DS_INLINE bool weigh(Softmax &softmax, float *scores, int64_t n) {
    LanesOf<N> most, total = {};
    most.load(softmax.most);
    for (int64_t k = 0; k < n; ++k) {
        LanesOf<N> own;
        own.load(scores + k * kLanes);
        most.take_larger(own);
    }
    alignas(64) float new_most[kRows], anchor[kRows];
    most.store(new_most);
    bool changed = false;
    for (int64_t q = 0; q < kRows; ++q) {
        anchor[q] = new_most[q] == kNone ? 0.0f : new_most[q];
        changed |= new_most[q] != softmax.most[q];
    }
    for (int64_t k = 0; k < n; ++k) {
        float *__restrict own = scores + k * kLanes;
        DS_IVDEP for (int64_t q = 0; q < kRows; ++q) own[q] = exponential(own[q] - anchor[q]);
        LanesOf<N> more;
        more.load(own);
        total.add(more);
    }
    alignas(64) float more[kRows];
    total.store(more);
    for (int64_t q = 0; q < kRows; ++q) {
        softmax.kept[q] = exponential(softmax.most[q] - anchor[q]);
        softmax.total[q] = softmax.total[q] * softmax.kept[q] + more[q];
        softmax.most[q] = new_most[q];
    }
    return changed;
}

DS_INLINE void scale_rows(float *rows, int64_t size, const float *factors) {
    for (int64_t q = 0; q < kRows; ++q) {
        float *__restrict own = rows + q * size;
        const float factor = factors[q];
        DS_IVDEP for (int64_t c = 0; c < size; ++c) own[c] = own[c] * factor;
    }
}

// `known`: the size of a head, where the compiler knows it: addresses of rows are then constants. Else 0.
template <int N, int64_t known>
DS_INLINE void forward_sized_body(const Call &call, Item item) {
    constexpr int64_t R = kTogether<N>;
    const int64_t size = known > 0 ? known : call.size;
    alignas(64) float buffer[kRows * kMost], panel[kRows * kMost], scores[kRows * kChunk], sums[kRows * kMost];
    const int64_t base = item.head * call.tokens;
    const bool narrow = call.dtype != DS_FLOAT32;
    make_panel<N>(wide_rows(call, call.query, (base + item.row) * size, size, buffer), size, call.scale, panel);
    Softmax softmax;
    std::fill(softmax.most, softmax.most + kRows, kNone);
    std::fill(softmax.total, softmax.total + kRows, 0.0f);
    std::fill(sums, sums + kRows * size, 0.0f);
    int64_t tokens[kChunk / kRows];
    const float *values[kChunk / kRows];
    bool first = true;
    while (const int64_t count = next_keys(call, item, tokens)) {
        for (int64_t b = 0; b < count; ++b) {
            float *own = scores + b * kRows * kLanes;
            times_panel<N, R>(wide_rows(call, call.key, (base + tokens[b]) * size, size, buffer), size, panel, own);
            add_masks<N>(call, item, tokens[b], own);
        }
        if (weigh<N>(softmax, scores, count * kRows) && !first) scale_rows(sums, size, softmax.kept);
        first = false;
        if (narrow) {
            for (int64_t b = 0; b < count; ++b) {
                values[0] = wide_rows(call, call.value, (base + tokens[b]) * size, size, buffer);
                add_to_queries<N, R / 4>(sums, size, scores + b * kRows * kLanes, values, 1);
            }
        } else {
            const float *all = static_cast<const float *>(call.value) + base * size;
            for (int64_t b = 0; b < count; ++b) values[b] = all + tokens[b] * size;
            add_to_queries<N, R / 4>(sums, size, scores, values, count);
        }
    }
    float factors[kRows];
    for (int64_t q = 0; q < kRows; ++q) {
        const bool some = softmax.total[q] > 0.0f;
        factors[q] = some ? 1.0f / softmax.total[q] : 0.0f;
        call.lse[base + item.row + q] = some ? softmax.most[q] + float(std::log(double(softmax.total[q]))) : kNone;
    }
    scale_rows(sums, size, factors);
    ds::narrow(ds::at(call.output, (base + item.row) * size, call.dtype), call.dtype, sums, kRows * size);
}

// ---- backward -------------------------------------------------------------------------------------------------------

// Sums for the gradients of a head's keys and values: [tokens][size] each. `begun`: of 16 tokens each, whether they hold
// something; otherwise their memory has not been touched.
struct Sums {
    float *keys, *values;
    uint8_t *begun;
};

// Products of 16 rows with 16 others, each with its own.
template <int N>
DS_INLINE void inner_products(const float *some, const float *others, int64_t size, float *out) {
    LanesOf<N> parts[kLanes] = {};
    for (int64_t q = 0; q < kRows; ++q)
        for (int64_t c = 0; c < size; c += kLanes) {
            LanesOf<N> one, other;
            one.load(some + q * size + c);
            other.load(others + q * size + c);
            parts[q].add_product(one, other);
        }
    ds::transpose(parts);
    for (int64_t half = kLanes / 2; half > 0; half /= 2)
        for (int64_t i = 0; i < half; ++i) parts[i].add(parts[i + half]);
    parts[0].store(out);
}

template <int N, int64_t known>
DS_INLINE void backward_sized_body(const Call &call, Item item, const Sums &to) {
    constexpr int64_t R = kTogether<N>;
    const int64_t size = known > 0 ? known : call.size;
    alignas(64) float query_buffer[kRows * kMost], grad_buffer[kRows * kMost], buffer[kRows * kMost];
    alignas(64) float panel[kRows * kMost], grad_panel[kRows * kMost], sums[kRows * kMost];
    alignas(64) float weights[kRows * kChunk], slopes[kRows * kChunk], means[kRows], anchor[kRows];
    const int64_t base = item.head * call.tokens, at = (base + item.row) * size;
    const bool narrow = call.dtype != DS_FLOAT32;
    const float *grad = wide_rows(call, call.grad_output, at, size, grad_buffer);
    inner_products<N>(grad, wide_rows(call, call.output, at, size, buffer), size, means);
    make_panel<N>(grad, size, 1.0f, grad_panel);
    const float *query = wide_rows(call, call.query, at, size, query_buffer);
    make_panel<N>(query, size, call.scale, panel);
    for (int64_t q = 0; q < kRows; ++q) {
        const float lse = call.lse[base + item.row + q];
        anchor[q] = lse == kNone ? 0.0f : lse;
    }
    std::fill(sums, sums + kRows * size, 0.0f);
    const float scale = call.scale;
    int64_t tokens[kChunk / kRows];
    const float *keys[kChunk / kRows];
    while (const int64_t count = next_keys(call, item, tokens)) {
        for (int64_t b = 0; b < count; ++b) {
            const int64_t from = (base + tokens[b]) * size;
            float *weight = weights + b * kRows * kLanes, *slope = slopes + b * kRows * kLanes;
            times_panel<N, R>(wide_rows(call, call.key, from, size, buffer), size, panel, weight);
            add_masks<N>(call, item, tokens[b], weight);
            times_panel<N, R>(wide_rows(call, call.value, from, size, buffer), size, grad_panel, slope);
            for (int64_t k = 0; k < kRows; ++k) {
                float *__restrict w = weight + k * kLanes, *__restrict s = slope + k * kLanes;
                DS_IVDEP for (int64_t q = 0; q < kRows; ++q) {
                    const float score = w[q] - anchor[q];
                    const float found = exponential(score > 0.0f ? 0.0f : score);
                    w[q] = found;
                    s[q] = (found * (s[q] - means[q])) * scale;
                }
            }
        }
        for (int64_t b = 0; b < count; ++b) {
            float *key_sums = to.keys + tokens[b] * size, *value_sums = to.values + tokens[b] * size;
            if (!to.begun[tokens[b] / kRows]) {
                to.begun[tokens[b] / kRows] = 1;
                std::fill(key_sums, key_sums + kRows * size, 0.0f);
                std::fill(value_sums, value_sums + kRows * size, 0.0f);
            }
            add_to_keys<N, R / 4>(value_sums, size, weights + b * kRows * kLanes, grad);
            add_to_keys<N, R / 4>(key_sums, size, slopes + b * kRows * kLanes, query);
            if (narrow) {
                keys[0] = wide_rows(call, call.key, (base + tokens[b]) * size, size, buffer);
                add_to_queries<N, R / 4>(sums, size, slopes + b * kRows * kLanes, keys, 1);
            } else {
                keys[b] = static_cast<const float *>(call.key) + (base + tokens[b]) * size;
            }
        }
        if (!narrow) add_to_queries<N, R / 4>(sums, size, slopes, keys, count);
    }
    ds::narrow(ds::at(call.grad_query, at, call.dtype), call.dtype, sums, kRows * size);
}

DS_LANES_APART(forward_sized, (int64_t known), (known), (const Call &call, Item item), (call, item))
DS_LANES_APART(backward_sized, (int64_t known), (known), (const Call &call, Item item, const Sums &to), (call, item, to))

template <int N>
DS_INLINE void forward_item_body(const Call &call, Item item) {
    switch (call.size) {
        case 64: return forward_sized<N, 64>(call, item);
        case 128: return forward_sized<N, 128>(call, item);
        default: return forward_sized<N, 0>(call, item);
    }
}

template <int N>
DS_INLINE void backward_item(const Call &call, Item item, const Sums &to) {
    switch (call.size) {
        case 64: return backward_sized<N, 64>(call, item, to);
        case 128: return backward_sized<N, 128>(call, item, to);
        default: return backward_sized<N, 0>(call, item, to);
    }
}

// Rows [first, last) of part `part` of a head: about equal numbers of blocks.
inline int64_t edge_of(const Call &call, int64_t head, int64_t part) {
    const int64_t rows = call.tokens / call.block, *starts = starts_of(call, head);
    if (part == call.parts) return call.tokens;
    const int64_t wanted = starts[0] + (starts[rows] - starts[0]) * part / call.parts;
    return (std::lower_bound(starts, starts + rows, wanted) - starts) * call.block;
}

// Where the sums of a part of a head are made: in the result itself where that has their type and there are no others.
DS_INLINE Sums sums_of(const Call &call, int64_t head, int64_t part, int64_t thread, uint8_t *begun) {
    const int64_t numel = call.tokens * call.size;
    if (call.parts > 1) {
        const int64_t at = (part * call.batch * call.heads + head) * numel;
        return {call.key_sums + at, call.value_sums + at, begun};
    }
    if (call.dtype == DS_FLOAT32)
        return {static_cast<float *>(call.grad_key) + head * numel, static_cast<float *>(call.grad_value) + head * numel,
                begun};
    return {call.key_sums + thread * numel, call.value_sums + thread * numel, begun};
}

template <int N>
DS_INLINE void backward_head_body(const Call &call, int64_t head, int64_t part, const Sums &to) {
    const int64_t first = edge_of(call, head, part), last = edge_of(call, head, part + 1), block = kRows * call.size;
    for (int64_t row = first; row < last; row += kRows) backward_item<N>(call, item_at(call, head, row), to);
    for (int64_t b = 0; b < call.tokens / kRows; ++b)
        if (!to.begun[b]) {  // nothing sees these
            std::fill(to.keys + b * block, to.keys + (b + 1) * block, 0.0f);
            std::fill(to.values + b * block, to.values + (b + 1) * block, 0.0f);
        }
    if (call.parts > 1 || call.dtype == DS_FLOAT32) return;
    const int64_t numel = call.tokens * call.size;
    ds::narrow(ds::at(call.grad_key, head * numel, call.dtype), call.dtype, to.keys, numel);
    ds::narrow(ds::at(call.grad_value, head * numel, call.dtype), call.dtype, to.values, numel);
}

// ---- instruction sets -----------------------------------------------------------------------------------------------

DS_LANES_KERNEL(forward_item, (const Call &call, Item item), (call, item))
DS_LANES_KERNEL(backward_head, (const Call &call, int64_t head, int64_t part, const Sums &to), (call, head, part, to))

void prepare(const Call &call, void *result) {
    const int64_t numel = call.batch * call.heads * call.tokens * call.size;
    ds::ask_for_large_pages(result, numel * ds::item_size(call.dtype));
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
    prepare(*call, call->output);
    const int64_t per_head = call->tokens / kRows, count = call->batch * call->heads * per_head;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
    for (int64_t i = 0; i < count; ++i)
        forward_item(*call, item_at(*call, i / per_head, i % per_head * kRows));
    return 1;
}

int32_t ds_sparse_attention_backward(const ds_sparse_attention *call, int32_t threads) {
    if (!fits(*call)) return 0;
    if (threads < 1) threads = 1;
    for (void *result : {call->grad_query, call->grad_key, call->grad_value}) prepare(*call, result);
    const int64_t count = call->batch * call->heads * call->parts;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t i = 0; i < count; ++i) {
        const int64_t head = i / call->parts, part = i % call->parts;
        std::vector<uint8_t> begun(size_t(call->tokens / kRows));
        backward_head(*call, head, part, sums_of(*call, head, part, this_thread(), begun.data()));
    }
    if (call->parts == 1) return 1;
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
