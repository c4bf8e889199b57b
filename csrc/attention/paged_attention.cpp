// Attention of a few tokens of each of many sequences over a paged cache, which is read in place.
//
// A work item is one sequence, one head of keys, and a tile of its rows, which are the query heads that share the head, of
// all tokens. It walks the sequence block by block (M. Milakov, N. Gimelshein: Online normalizer calculation for
// softmax, 2018), so that each key and value is read once for all rows of the tile.
//
// Keys lie transposed in the cache, one number of all tokens of a block beside each other: the scores of kLanes tokens are
// one chain of additions per lane (lanes.h), and no sum goes across a vector. Some blocks are taken together: their chains
// do not wait for each other, and while their keys are read, their values are asked of the memory, and the next keys while
// these are added up.
#include <algorithm>
#include <cmath>
#include <vector>

#include "exponential.h"
#include "lanes.h"
#include "operations.h"

namespace {

using ds::exponential;
using ds::kLanes;

constexpr int64_t kRows = 16;     // of a tile
constexpr int64_t kTogether = 4;  // rows for which a key or value is loaded once
constexpr int64_t kChains = 4;    // sums that are computed beside each other: an addition waits for the one before it
constexpr int64_t kBlocks = 4;    // of which scores are computed together
constexpr int64_t kLine = 64;

// The kLanes lanes of a vector, N to a register: parts of a vector, of which so many are computed beside each other that
// the sums of kChains vectors are in registers.
template <int N>
struct Parts {
    using Floats = typename ds::Vector<N>::Floats;
    static constexpr int64_t all = kLanes / N, together = all < 2 ? all : 2, lanes = together * N;

    static DS_INLINE_MEMBER void load(Floats &to, const float *from) { std::memcpy(&to, from, sizeof to); }
    static DS_INLINE_MEMBER void store(float *to, const Floats &from) { std::memcpy(to, &from, sizeof from); }
};

// to[c][r][0..lanes) = query[r] times the keys of some tokens, of C of those beside each other; `keys` [size][stride]. With
// `asks` one line at `ask` is asked of the memory with each number of a key.
template <int N, bool asks, int64_t R, int64_t C>
DS_INLINE void score_parts(const float *query, int64_t size, const float *const (&keys)[C], int64_t first, int64_t stride,
                           const char *const (&ask)[C], float *const (&to)[C], int64_t to_row) {
    using P = Parts<N>;
    typename P::Floats sums[R][C][P::together] = {};
    for (int64_t d = 0; d < size; ++d)
        DS_UNROLL for (int64_t c = 0; c < C; ++c) {
            if constexpr (asks) ds::ask_for(ask[c] + d * kLine);
            DS_UNROLL for (int64_t p = 0; p < P::together; ++p) {
                typename P::Floats key;
                P::load(key, keys[c] + first + d * stride + p * N);
                DS_UNROLL for (int64_t r = 0; r < R; ++r) sums[r][c][p] += query[r * size + d] * key;
            }
        }
    DS_UNROLL for (int64_t r = 0; r < R; ++r)
        DS_UNROLL for (int64_t c = 0; c < C; ++c)
            DS_UNROLL for (int64_t p = 0; p < P::together; ++p) P::store(to[c] + r * to_row + first + p * N, sums[r][c][p]);
}

// The same of 16 tokens.
template <int N, int64_t R, int64_t C>
DS_INLINE void score_lanes(const float *query, int64_t size, const float *const (&keys)[C], int64_t stride,
                           const char *const (&ask)[C], float *const (&to)[C], int64_t to_row) {
    score_parts<N, true, R, C>(query, size, keys, 0, stride, ask, to, to_row);
    for (int64_t first = Parts<N>::lanes; first < kLanes; first += Parts<N>::lanes)
        score_parts<N, false, R, C>(query, size, keys, first, stride, ask, to, to_row);
}

// sums[r] += weights[r][j] * values[j], for n tokens j and some numbers of each of D vectors.
template <int N, bool asks, int64_t R, int64_t D>
DS_INLINE void add_parts(const float *weights, int64_t weights_stride, const float *values, int64_t n, int64_t size,
                         const char *ask, float *sums) {
    using P = Parts<N>;
    typename P::Floats total[R][D][P::together];
    DS_UNROLL for (int64_t r = 0; r < R; ++r)
        DS_UNROLL for (int64_t v = 0; v < D; ++v)
            DS_UNROLL for (int64_t p = 0; p < P::together; ++p) P::load(total[r][v][p], sums + r * size + v * kLanes + p * N);
    for (int64_t j = 0; j < n; ++j)
        DS_UNROLL for (int64_t v = 0; v < D; ++v) {
            if constexpr (asks) ds::ask_for(ask + (j * D + v) * kLine);
            DS_UNROLL for (int64_t p = 0; p < P::together; ++p) {
                typename P::Floats value;
                P::load(value, values + j * size + v * kLanes + p * N);
                DS_UNROLL for (int64_t r = 0; r < R; ++r) total[r][v][p] += weights[r * weights_stride + j] * value;
            }
        }
    DS_UNROLL for (int64_t r = 0; r < R; ++r)
        DS_UNROLL for (int64_t v = 0; v < D; ++v)
            DS_UNROLL for (int64_t p = 0; p < P::together; ++p) P::store(sums + r * size + v * kLanes + p * N, total[r][v][p]);
}

// The same of D vectors of numbers.
template <int N, int64_t R, int64_t D>
DS_INLINE void add_vectors(const float *weights, int64_t weights_stride, const float *values, int64_t n, int64_t size,
                           const char *ask, float *sums) {
    add_parts<N, true, R, D>(weights, weights_stride, values, n, size, ask, sums);
    for (int64_t first = Parts<N>::lanes; first < kLanes; first += Parts<N>::lanes)
        add_parts<N, false, R, D>(weights, weights_stride, values + first, n, size, ask, sums + first);
}

// The same of all numbers. As many lines as the values have are asked of the memory, from `ask` on.
template <int N, int64_t R>
DS_INLINE void add_values(const float *weights, int64_t weights_stride, const float *values, int64_t n, int64_t size,
                          const char *ask, float *sums) {
    constexpr int64_t D = kChains / R;
    int64_t d = 0;
    for (; d + D * kLanes <= size; d += D * kLanes)
        add_vectors<N, R, D>(weights, weights_stride, values + d, n, size, ask + d / kLanes * n * kLine, sums + d);
    for (; d + kLanes <= size; d += kLanes)
        add_vectors<N, R, 1>(weights, weights_stride, values + d, n, size, ask + d / kLanes * n * kLine, sums + d);
    for (; d < size; ++d)
        for (int64_t r = 0; r < R; ++r)
            for (int64_t j = 0; j < n; ++j) sums[r * size + d] += weights[r * weights_stride + j] * values[j * size + d];
}

struct Row {
    int64_t first, last;  // positions that it sees
    float largest, total;
};

struct Scratch {
    std::vector<float> query, key, padded, value, scores, sums;
};

struct Item {
    const ds_paged_piece *piece;
    int64_t head, first_row, rows;
};

template <class T>
void write_new(const ds_paged_layer &layer, const ds_paged_piece &piece) {
    const int64_t size = layer.block_size, key_size = layer.key_size, value_size = layer.value_size;
    for (int64_t t = 0; t < piece.count; ++t) {
        const int64_t position = piece.start + t, block = piece.blocks[position / size], offset = position % size;
        for (int64_t h = 0; h < layer.kv_heads; ++h) {
            const T *key = static_cast<const T *>(layer.new_keys) + h * layer.key_head_stride +
                           (piece.row + t) * layer.key_token_stride;
            const T *value = static_cast<const T *>(layer.new_values) + h * layer.value_head_stride +
                             (piece.row + t) * layer.value_token_stride;
            const int64_t slot = (block * layer.kv_heads + h) * size;
            T *keys = static_cast<T *>(layer.keys) + slot * key_size + offset;
            for (int64_t d = 0; d < key_size; ++d) keys[d * size] = key[d];
            std::memcpy(static_cast<T *>(layer.values) + (slot + offset) * value_size, value,
                        size_t(value_size) * sizeof(T));
        }
    }
}

// Blocks beside each other in a sequence, of one head: their keys and values as fp32, the values as they are stored, and what
// is read after them: the keys of the blocks that come next.
struct Group {
    int64_t count, position;
    const float *keys[kBlocks], *values[kBlocks];
    const char *stored_values[kBlocks], *next[kBlocks];
};

// R rows' scores with 16 keys at a time, which begin at key 16 * `vector` of a group's blocks.
template <int N, int64_t R, int64_t C>
DS_INLINE void score_vectors(const ds_paged_layer &layer, const Group &group, int64_t vector, const float *query,
                             Scratch &scratch) {
    const int64_t size = layer.block_size, in_block = (size + kLanes - 1) / kLanes, width = in_block * kLanes;
    const float *keys[C];
    const char *ask[C];
    float *to[C];
    int64_t stride = size;
    for (int64_t c = 0; c < C; ++c) {
        const int64_t block = (vector + c) / in_block, j = (vector + c) % in_block * kLanes;
        keys[c] = group.keys[block] + j;
        ask[c] = group.stored_values[block] + j / kLanes * layer.key_size * kLine;
        to[c] = scratch.scores.data() + block * kTogether * width + j;
        if (j + kLanes <= size) continue;  // else a block that is no multiple of the lanes: C is 1
        for (int64_t d = 0; d < layer.key_size; ++d)
            for (int64_t k = 0; k < kLanes; ++k)
                scratch.padded[size_t(d * kLanes + k)] = j + k < size ? keys[c][d * size + k] : 0.0f;
        keys[c] = scratch.padded.data(), stride = kLanes;
    }
    score_lanes<N, R, C>(query, layer.key_size, keys, stride, ask, to, width);
}

// Scores of n tokens from `position` on -> their weights beside what was before, by which `sums` are scaled.
DS_INLINE void weigh(const ds_paged_layer &layer, Row &own, int64_t position, int64_t n, float *score, float *sums) {
    for (int64_t j = 0; j < n; ++j) score[j] *= layer.scale;
    if (layer.softcap > 0)
        for (int64_t j = 0; j < n; ++j) score[j] = layer.softcap * std::tanh(score[j] / layer.softcap);
    const int64_t begin = std::clamp<int64_t>(own.first - position, 0, n);
    const int64_t end = std::clamp<int64_t>(own.last + 1 - position, begin, n);
    float largest = own.largest;
    for (int64_t j = begin; j < end; ++j) largest = score[j] > largest ? score[j] : largest;
    if (largest > own.largest) {
        const float scale = own.total > 0 ? exponential(own.largest - largest) : 0.0f;
        DS_IVDEP for (int64_t d = 0; d < layer.value_size; ++d) sums[d] *= scale;
        own.total *= scale;
        own.largest = largest;
    }
    for (int64_t j = 0; j < begin; ++j) score[j] = 0.0f;
    DS_IVDEP for (int64_t j = begin; j < end; ++j) score[j] = exponential(score[j] - largest);
    for (int64_t j = end; j < n; ++j) score[j] = 0.0f;
    for (int64_t j = begin; j < end; ++j) own.total += score[j];
}

// R rows of the tile from `first` on: their scores with the keys of a group, then the values, block by block. `last`: the
// last position of the tile.
template <int N, int64_t R>
DS_INLINE void rows_of_group(const ds_paged_layer &layer, const Group &group, Row *row, int64_t first, int64_t last,
                             Scratch &scratch) {
    constexpr int64_t C = kChains / R;
    const int64_t size = layer.block_size, in_block = (size + kLanes - 1) / kLanes, width = in_block * kLanes;
    const int64_t vectors = group.count * in_block;
    const float *query = scratch.query.data() + first * layer.key_size;
    int64_t vector = 0;
    for (; vector + C <= vectors && size % kLanes == 0; vector += C)
        score_vectors<N, R, C>(layer, group, vector, query, scratch);
    for (; vector < vectors; ++vector) score_vectors<N, R, 1>(layer, group, vector, query, scratch);
    float *sums = scratch.sums.data() + first * layer.value_size;
    for (int64_t block = 0; block < group.count; ++block) {
        const int64_t position = group.position + block * size, n = std::min(last - position + 1, size);
        float *scores = scratch.scores.data() + block * kTogether * width;
        for (int64_t r = 0; r < R; ++r)
            weigh(layer, row[first + r], position, n, scores + r * width, sums + r * layer.value_size);
        add_values<N, R>(scores, width, group.values[block], n, layer.value_size, group.next[block], sums);
    }
}

// The group of a head's blocks from `block` on, up to that of position `last`.
DS_INLINE void read_group(const ds_paged_layer &layer, const ds_paged_piece &piece, int64_t head, int64_t block,
                          int64_t last, Group &group, Scratch &scratch) {
    const int64_t size = layer.block_size, blocks = last / size + 1;
    const auto stored = [&](const void *pages, int64_t of, int64_t place, int64_t numbers) {
        const int64_t slot = (piece.blocks[place] * layer.kv_heads + of) * size;
        return ds::at(static_cast<const char *>(pages), slot * numbers, layer.dtype);
    };
    group.count = std::min(blocks - block, kBlocks);
    group.position = block * size;
    for (int64_t b = 0; b < group.count; ++b) {
        const int64_t place = block + b, n = std::min(last - place * size + 1, size);
        const char *keys = stored(layer.keys, head, place, layer.key_size);
        group.stored_values[b] = stored(layer.values, head, place, layer.value_size);
        group.keys[b] = ds::widen(keys, layer.dtype, scratch.key.data() + b * size * layer.key_size, size * layer.key_size);
        group.values[b] = ds::widen(group.stored_values[b], layer.dtype,
                                    scratch.value.data() + b * size * layer.value_size, n * layer.value_size);
        const bool more = place + kBlocks < blocks, other = !more && head + 1 < layer.kv_heads;
        group.next[b] = more    ? stored(layer.keys, head, place + kBlocks, layer.key_size)
                        : other ? stored(layer.keys, head + 1, b, layer.key_size)
                                : keys;
    }
}

template <int N>
DS_INLINE void attend_body(const ds_paged_layer &layer, const Item &item, Scratch &scratch) {
    const ds_paged_piece &piece = *item.piece;
    const int64_t group = layer.heads / layer.kv_heads, size = layer.block_size, rows = item.rows;
    const int64_t width = (size + kLanes - 1) / kLanes * kLanes;
    scratch.query.resize(size_t(rows * layer.key_size));
    scratch.key.resize(size_t(kBlocks * size * layer.key_size));
    scratch.padded.resize(size_t(kLanes * layer.key_size));
    scratch.value.resize(size_t(kBlocks * size * layer.value_size));
    scratch.scores.resize(size_t(kBlocks * kTogether * width));
    scratch.sums.assign(size_t(rows * layer.value_size), 0.0f);
    Row row[kRows] = {};
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t token = (item.first_row + r) / group, head = item.head * group + (item.first_row + r) % group;
        const int64_t position = piece.start + token;
        const int64_t first = layer.window > 0 ? position - layer.window + 1 : 0;
        row[r] = {first > 0 ? first : 0, position, -INFINITY, 0.0f};
        const void *source = ds::at(static_cast<const char *>(layer.query),
                                    head * layer.query_head_stride + (piece.row + token) * layer.query_token_stride,
                                    layer.query_dtype);
        float *query = scratch.query.data() + r * layer.key_size;
        const float *wide = ds::widen(source, layer.query_dtype, query, layer.key_size);
        if (wide != query) std::memcpy(query, wide, size_t(layer.key_size) * sizeof(float));
        if (layer.sinks != nullptr) {  // takes part in the softmax, without a value
            row[r].largest = layer.sinks[head];
            row[r].total = 1.0f;
        }
    }
    const int64_t last = row[rows - 1].last;
    for (int64_t block = row[0].first / size; block * size <= last; block += kBlocks) {
        Group group;
        read_group(layer, piece, item.head, block, last, group, scratch);
        int64_t r = 0;
        for (; r + kTogether <= rows; r += kTogether) rows_of_group<N, kTogether>(layer, group, row, r, last, scratch);
        switch (rows - r) {
            case 3: rows_of_group<N, 3>(layer, group, row, r, last, scratch); break;
            case 2: rows_of_group<N, 2>(layer, group, row, r, last, scratch); break;
            case 1: rows_of_group<N, 1>(layer, group, row, r, last, scratch); break;
            default: break;
        }
    }
    for (int64_t r = 0; r < rows; ++r) {
        float *sums = scratch.sums.data() + r * layer.value_size;
        DS_IVDEP for (int64_t d = 0; d < layer.value_size; ++d) sums[d] /= row[r].total;
        const int64_t token = piece.row + (item.first_row + r) / group;
        const int64_t head = item.head * group + (item.first_row + r) % group;
        ds::narrow(ds::at(static_cast<char *>(layer.output), (token * layer.heads + head) * layer.value_size,
                          layer.query_dtype),
                   layer.query_dtype, sums, layer.value_size);
    }
}

DS_LANES_KERNEL(attend, (const ds_paged_layer &layer, const Item &item, Scratch &scratch), (layer, item, scratch))

}  // namespace

void ds_paged_attention(const ds_paged_layer *layer, const ds_paged_piece *pieces, int64_t count, int32_t threads) {
    const int64_t group = layer->heads / layer->kv_heads;
    static thread_local std::vector<Item> items;
    items.clear();
    int64_t work = 0;
    for (int64_t p = 0; p < count; ++p) {
        if (pieces[p].writes) {
            if (layer->dtype == DS_FLOAT32)
                write_new<float>(*layer, pieces[p]);
            else
                write_new<uint16_t>(*layer, pieces[p]);
        }
        if (!pieces[p].attends) continue;
        work += (pieces[p].start + pieces[p].count) * pieces[p].count * layer->heads * layer->key_size;
        for (int64_t head = 0; head < layer->kv_heads; ++head)
            for (int64_t row = 0; row < pieces[p].count * group; row += kRows) {
                const int64_t left = pieces[p].count * group - row;
                items.push_back({pieces + p, head, row, left < kRows ? left : kRows});
            }
    }
    const Item *list = items.data();
    const int64_t total = int64_t(items.size());
    if (threads <= 1 || work < ds::kParallelNumel) {
        static thread_local Scratch scratch;
        for (int64_t i = 0; i < total; ++i) attend(*layer, list[i], scratch);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        static thread_local Scratch scratch;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < total; ++i) attend(*layer, list[i], scratch);
    }
}

// Few rows, of a sequence each: threads keep to their shares.
static bool own_rows(const ds_step &step) { return step.rows == step.count && step.rows <= ds::kOwnRows; }

void ds::attention(const ds_paged_layer &layer, const ds_step &step, const Team &team) {
    static thread_local Scratch scratch;
    const int64_t group = layer.heads / layer.kv_heads;
    const auto tiles_of = [&](const ds_paged_piece &piece) { return (piece.count * group + kRows - 1) / kRows; };
    int64_t units = 0, p = 0, first = 0;
    for (int64_t i = 0; i < step.count; ++i) units += layer.kv_heads * tiles_of(step.pieces[i]);
    const auto work = [&](int64_t number) {
        if (number < first) p = first = 0;
        for (; number >= first + layer.kv_heads * tiles_of(step.pieces[p]); ++p)
            first += layer.kv_heads * tiles_of(step.pieces[p]);
        const ds_paged_piece &piece = step.pieces[p];
        const int64_t head = (number - first) / tiles_of(piece), row = (number - first) % tiles_of(piece) * kRows;
        const int64_t left = piece.count * group - row;
        attend(layer, {&piece, head, row, left < kRows ? left : kRows}, scratch);
    };
    if (own_rows(step))
        for_own_share(team, units, work);
    else
        for_shares(team, units, [&](int64_t begin, int64_t end) {
            for (int64_t number = begin; number < end; ++number) work(number);
        });
}

bool ds::attention_alike(const ds_paged_layer &layer, const ds_rotary &rotary, const ds_step &step) {
    return own_rows(step) && rotary.projected == layer.query && rotary.heads == layer.heads &&
           rotary.kv_heads == layer.kv_heads && layer.heads <= kRows * layer.kv_heads;
}
