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
constexpr int64_t kBlocks = 4;    // of which scores are computed together

// The kLanes lanes of a vector, N to a register: parts of a vector, of which so many are computed beside each other that
// the sums of some vectors are in registers.
template <int N>
struct Parts {
    using Floats = typename ds::Vector<N>::Floats;
    static constexpr int64_t all = kLanes / N, together = all < 2 ? all : 2, lanes = together * N;

    // Vectors of keys, and of numbers of values, whose sums for R rows are computed beside each other: an addition waits for
    // the one before it.
    template <int64_t R>
    static constexpr int64_t keys = 4 / R;
    template <int64_t R>
    static constexpr int64_t numbers = N == 16 && R > 2 ? 2 : 4 / R;

    static DS_INLINE_MEMBER void load(Floats &to, const float *from) { std::memcpy(&to, from, sizeof to); }
    static DS_INLINE_MEMBER void store(float *to, const Floats &from) { std::memcpy(to, &from, sizeof from); }
};

// Keys and values as the cache has them, which are widened where they are multiplied: in memory of their own they would
// drive out of the first-level cache what is there, and be read before they were asked for.
template <int N, int32_t dtype>
struct Stored {
    using Number = std::conditional_t<dtype == DS_FLOAT32, float, uint16_t>;
    using Floats = typename ds::Vector<N>::Floats;

    static DS_INLINE_MEMBER void load(Floats &to, const Number *from) {
        if constexpr (dtype == DS_FLOAT32) {
            Parts<N>::load(to, from);
        } else if constexpr (dtype == DS_BFLOAT16) {
            typename ds::Vector<N>::Words words;
            ds::Vector<N>::widen(words, from);
            words <<= 16;
            std::memcpy(&to, &words, sizeof to);
        } else {
            alignas(Floats) float wide[N];
            DS_IVDEP for (int i = 0; i < N; ++i) wide[i] = ds::widen_float16(from[i]);
            Parts<N>::load(to, wide);
        }
    }
};

template <int32_t dtype>
using NumberOf = typename Stored<1, dtype>::Number;

// to[c][r][0..lanes) = query[r] times the keys of some tokens, of C of those beside each other; `keys` [size][stride]. With
// `asks` the `pitch` bytes at `ask` and those that follow are asked of the memory, so many with each number of a key.
template <int N, int32_t dtype, bool asks, int64_t R, int64_t C>
DS_INLINE void score_parts(const float *query, int64_t size, const NumberOf<dtype> *const (&keys)[C], int64_t first,
                           int64_t stride, const char *const (&ask)[C], int64_t pitch, float *const (&to)[C], int64_t to_row) {
    using P = Parts<N>;
    typename P::Floats sums[R][C][P::together] = {};
    for (int64_t d = 0; d < size; ++d)
        DS_UNROLL for (int64_t c = 0; c < C; ++c) {
            if constexpr (asks) ds::ask_for(ask[c] + d * pitch);
            DS_UNROLL for (int64_t p = 0; p < P::together; ++p) {
                typename P::Floats key;
                Stored<N, dtype>::load(key, keys[c] + first + d * stride + p * N);
                DS_UNROLL for (int64_t r = 0; r < R; ++r) sums[r][c][p] += query[r * size + d] * key;
            }
        }
    DS_UNROLL for (int64_t r = 0; r < R; ++r)
        DS_UNROLL for (int64_t c = 0; c < C; ++c)
            DS_UNROLL for (int64_t p = 0; p < P::together; ++p) P::store(to[c] + r * to_row + first + p * N, sums[r][c][p]);
}

// The same of 16 tokens.
template <int N, int32_t dtype, int64_t R, int64_t C>
DS_INLINE void score_lanes(const float *query, int64_t size, const NumberOf<dtype> *const (&keys)[C], int64_t stride,
                           const char *const (&ask)[C], int64_t pitch, float *const (&to)[C], int64_t to_row) {
    score_parts<N, dtype, true, R, C>(query, size, keys, 0, stride, ask, pitch, to, to_row);
    for (int64_t first = Parts<N>::lanes; first < kLanes; first += Parts<N>::lanes)
        score_parts<N, dtype, false, R, C>(query, size, keys, first, stride, ask, pitch, to, to_row);
}

// sums[r] += weights[r][j] * values[j], for n tokens j and some numbers of each of D vectors.
template <int N, int32_t dtype, bool asks, int64_t R, int64_t D>
DS_INLINE void add_parts(const float *weights, int64_t weights_stride, const NumberOf<dtype> *values, int64_t n, int64_t size,
                         const char *ask, int64_t pitch, float *sums) {
    using P = Parts<N>;
    typename P::Floats total[R][D][P::together];
    DS_UNROLL for (int64_t r = 0; r < R; ++r)
        DS_UNROLL for (int64_t v = 0; v < D; ++v)
            DS_UNROLL for (int64_t p = 0; p < P::together; ++p) P::load(total[r][v][p], sums + r * size + v * kLanes + p * N);
    for (int64_t j = 0; j < n; ++j)
        DS_UNROLL for (int64_t v = 0; v < D; ++v) {
            if constexpr (asks) ds::ask_for(ask + (j * D + v) * pitch);
            DS_UNROLL for (int64_t p = 0; p < P::together; ++p) {
                typename P::Floats value;
                Stored<N, dtype>::load(value, values + j * size + v * kLanes + p * N);
                DS_UNROLL for (int64_t r = 0; r < R; ++r) total[r][v][p] += weights[r * weights_stride + j] * value;
            }
        }
    DS_UNROLL for (int64_t r = 0; r < R; ++r)
        DS_UNROLL for (int64_t v = 0; v < D; ++v)
            DS_UNROLL for (int64_t p = 0; p < P::together; ++p) P::store(sums + r * size + v * kLanes + p * N, total[r][v][p]);
}

// The same of D vectors of numbers.
template <int N, int32_t dtype, int64_t R, int64_t D>
DS_INLINE void add_vectors(const float *weights, int64_t weights_stride, const NumberOf<dtype> *values, int64_t n, int64_t size,
                           const char *ask, int64_t pitch, float *sums) {
    add_parts<N, dtype, true, R, D>(weights, weights_stride, values, n, size, ask, pitch, sums);
    for (int64_t first = Parts<N>::lanes; first < kLanes; first += Parts<N>::lanes)
        add_parts<N, dtype, false, R, D>(weights, weights_stride, values + first, n, size, ask, pitch, sums + first);
}

// The same of all numbers. As many bytes as the values have are asked of the memory, from `ask` on.
template <int N, int32_t dtype, int64_t R>
DS_INLINE void add_values(const float *weights, int64_t weights_stride, const NumberOf<dtype> *values, int64_t n, int64_t size,
                          const char *ask, int64_t pitch, float *sums) {
    constexpr int64_t D = Parts<N>::template numbers<R>;
    int64_t d = 0;
    for (; d + D * kLanes <= size; d += D * kLanes)
        add_vectors<N, dtype, R, D>(weights, weights_stride, values + d, n, size, ask + d / kLanes * n * pitch, pitch,
                                    sums + d);
    for (; d + kLanes <= size; d += kLanes)
        add_vectors<N, dtype, R, 1>(weights, weights_stride, values + d, n, size, ask + d / kLanes * n * pitch, pitch,
                                    sums + d);
    for (; d < size; ++d)
        for (int64_t j = 0; j < n; ++j) {
            float value;
            Stored<1, dtype>::load(value, values + j * size + d);
            for (int64_t r = 0; r < R; ++r) sums[r * size + d] += weights[r * weights_stride + j] * value;
        }
}

struct Row {
    int64_t first, last;  // positions that it sees
    float largest, total;
};

struct Scratch {
    std::vector<float> query, padded, scores, sums;
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

// Blocks beside each other in a sequence, of one head: their keys and values, and what is read after them: the keys of the
// blocks that come next.
struct Group {
    int64_t count, position;
    int64_t pitch;  // bytes of kLanes stored numbers
    const char *keys[kBlocks], *values[kBlocks], *next[kBlocks];
};

// Vectors of scores of a block, and scores of a row with the keys of a group.
DS_INLINE int64_t vectors_of(const ds_paged_layer &layer) { return (layer.block_size + kLanes - 1) / kLanes; }
DS_INLINE int64_t scores_of_row(const ds_paged_layer &layer) { return kBlocks * vectors_of(layer) * kLanes; }

// R rows' scores with 16 keys at a time, which begin at key 16 * `vector` of a group's blocks.
template <int N, int32_t dtype, int64_t R, int64_t C>
DS_INLINE void score_vectors(const ds_paged_layer &layer, const Group &group, int64_t vector, const float *query,
                             Scratch &scratch) {
    const int64_t size = layer.block_size, in_block = vectors_of(layer);
    using Number = NumberOf<dtype>;
    const Number *keys[C];
    const char *ask[C];
    float *to[C];
    int64_t stride = size;
    for (int64_t c = 0; c < C; ++c) {
        const int64_t block = (vector + c) / in_block, j = (vector + c) % in_block * kLanes;
        keys[c] = reinterpret_cast<const Number *>(group.keys[block]) + j;
        ask[c] = group.values[block] + j / kLanes * layer.key_size * group.pitch;
        to[c] = scratch.scores.data() + (vector + c) * kLanes;
        if (j + kLanes <= size) continue;  // else a block that is no multiple of the lanes: C is 1
        Number *padded = reinterpret_cast<Number *>(scratch.padded.data());
        for (int64_t d = 0; d < layer.key_size; ++d)
            for (int64_t k = 0; k < kLanes; ++k) padded[d * kLanes + k] = j + k < size ? keys[c][d * size + k] : Number(0);
        keys[c] = padded, stride = kLanes;
    }
    score_lanes<N, dtype, R, C>(query, layer.key_size, keys, stride, ask, group.pitch, to, scores_of_row(layer));
}

// Scores as the softmax has them, those with tokens that the row does not see at -infinity. Returns the largest.
template <int N>
DS_INLINE float finish_scores(const ds_paged_layer &layer, const Group &group, const Row &own, float *scores) {
    const int64_t in_block = vectors_of(layer), size = layer.block_size;
    ds::LanesOf<N> largest = {};
    for (int64_t vector = 0; vector < group.count * in_block; ++vector) {
        float *score = scores + vector * kLanes;
        const int64_t in = vector % in_block * kLanes, position = group.position + vector / in_block * size + in;
        const int64_t begin = std::clamp<int64_t>(own.first - position, 0, kLanes);
        const int64_t end = std::clamp<int64_t>(own.last + 1 - position, begin, kLanes), room = size - in;
        ds::LanesOf<N> lanes;
        lanes.load(score);
        lanes.multiply(layer.scale);
        lanes.store(score);
        if (layer.softcap > 0)
            for (int64_t j = 0; j < kLanes; ++j) score[j] = layer.softcap * std::tanh(score[j] / layer.softcap);
        if (begin > 0 || end < kLanes || room < kLanes)
            for (int64_t j = 0; j < kLanes; ++j)
                if (j < begin || j >= end || j >= room) score[j] = -INFINITY;
        lanes.load(score);
        if (vector == 0)
            largest = lanes;
        else
            largest.take_larger(lanes);
    }
    return largest.largest();
}

// A row's products with the keys of a group -> their weights beside what was before, by which `sums` are scaled.
template <int N>
DS_INLINE void weigh_body(const ds_paged_layer &layer, const Group &group, Row &own, float *scores, float *sums) {
    const int64_t count = group.count * vectors_of(layer) * kLanes;
    const float seen = finish_scores<N>(layer, group, own, scores);
    if (seen > own.largest) {
        const float scale = own.total > 0 ? exponential(own.largest - seen) : 0.0f;
        DS_IVDEP for (int64_t d = 0; d < layer.value_size; ++d) sums[d] *= scale;
        own.total *= scale;
        own.largest = seen;
    }
    const float largest = own.largest > -INFINITY ? own.largest : 0.0f;  // of a row that has not seen anything
    ds::LanesOf<N> total = {};
    for (int64_t j = 0; j < count; j += kLanes) {
        float *score = scores + j;
        DS_IVDEP for (int64_t i = 0; i < kLanes; ++i) score[i] = exponential(score[i] - largest);
        ds::LanesOf<N> lanes;
        lanes.load(score);
        total.add(lanes);
    }
    own.total += total.sum();
}

DS_LANES_APART(weigh, (), (), (const ds_paged_layer &layer, const Group &group, Row &own, float *scores, float *sums),
               (layer, group, own, scores, sums))

// R rows of the tile from `first` on: their scores with the keys of a group, then the values, block by block. `last`: the
// last position of the tile.
template <int N, int32_t dtype, int64_t R>
DS_INLINE void rows_of_group_body(const ds_paged_layer &layer, const Group &group, Row *row, int64_t first, int64_t last,
                                  Scratch &scratch) {
    constexpr int64_t C = Parts<N>::template keys<R>;
    const int64_t size = layer.block_size, in_block = vectors_of(layer), width = scores_of_row(layer);
    const int64_t vectors = group.count * in_block;
    const float *query = scratch.query.data() + first * layer.key_size;
    int64_t vector = 0;
    for (; vector + C <= vectors && size % kLanes == 0; vector += C)
        score_vectors<N, dtype, R, C>(layer, group, vector, query, scratch);
    for (; vector < vectors; ++vector) score_vectors<N, dtype, R, 1>(layer, group, vector, query, scratch);
    float *sums = scratch.sums.data() + first * layer.value_size, *scores = scratch.scores.data();
    for (int64_t r = 0; r < R; ++r)
        weigh<N>(layer, group, row[first + r], scores + r * width, sums + r * layer.value_size);
    for (int64_t block = 0; block < group.count; ++block) {
        const int64_t n = std::min(last - (group.position + block * size) + 1, size);
        const auto *values = reinterpret_cast<const NumberOf<dtype> *>(group.values[block]);
        add_values<N, dtype, R>(scores + block * in_block * kLanes, width, values, n, layer.value_size, group.next[block],
                                group.pitch, sums);
    }
}

DS_LANES_APART(rows_of_group, (int32_t dtype, int64_t R), (dtype, R),
               (const ds_paged_layer &layer, const Group &group, Row *row, int64_t first, int64_t last, Scratch &scratch),
               (layer, group, row, first, last, scratch))

// The group of a head's blocks from `block` on, up to that of position `last`. Groups end at multiples of kBlocks, so that
// a row's sums are cut where they are cut without the other rows of its tile, which may see what came earlier.
DS_INLINE void read_group(const ds_paged_layer &layer, const ds_paged_piece &piece, int64_t head, int64_t block,
                          int64_t last, Group &group) {
    const int64_t size = layer.block_size, blocks = last / size + 1;
    const auto stored = [&](const void *pages, int64_t of, int64_t place, int64_t numbers) {
        const int64_t slot = (piece.blocks[place] * layer.kv_heads + of) * size;
        return ds::at(static_cast<const char *>(pages), slot * numbers, layer.dtype);
    };
    group.count = std::min(blocks - block, kBlocks - block % kBlocks);
    group.position = block * size;
    group.pitch = kLanes * ds::item_size(layer.dtype);
    for (int64_t b = 0; b < group.count; ++b) {
        const int64_t place = block + b;
        group.keys[b] = stored(layer.keys, head, place, layer.key_size);
        group.values[b] = stored(layer.values, head, place, layer.value_size);
        const bool more = place + group.count < blocks, other = !more && head + 1 < layer.kv_heads;
        group.next[b] = more    ? stored(layer.keys, head, place + group.count, layer.key_size)
                        : other ? stored(layer.keys, head + 1, b, layer.key_size)
                                : group.keys[b];
    }
}

template <int N, int32_t dtype>
DS_INLINE void walk(const ds_paged_layer &layer, const Item &item, Row *row, Scratch &scratch) {
    const int64_t size = layer.block_size, rows = item.rows, last = row[rows - 1].last;
    Group group;
    for (int64_t block = row[0].first / size; block * size <= last; block += group.count) {
        read_group(layer, *item.piece, item.head, block, last, group);
        int64_t r = 0;
        for (; r + kTogether <= rows; r += kTogether) rows_of_group<N, dtype, kTogether>(layer, group, row, r, last, scratch);
        switch (rows - r) {
            case 3: rows_of_group<N, dtype, 3>(layer, group, row, r, last, scratch); break;
            case 2: rows_of_group<N, dtype, 2>(layer, group, row, r, last, scratch); break;
            case 1: rows_of_group<N, dtype, 1>(layer, group, row, r, last, scratch); break;
            default: break;
        }
    }
}

template <int N>
DS_INLINE void attend_body(const ds_paged_layer &layer, const Item &item, Scratch &scratch) {
    const ds_paged_piece &piece = *item.piece;
    const int64_t group = layer.heads / layer.kv_heads, rows = item.rows;
    scratch.query.resize(size_t(rows * layer.key_size));
    scratch.padded.resize(size_t(kLanes * layer.key_size));
    scratch.scores.resize(size_t(kTogether * scores_of_row(layer)));
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
    switch (layer.dtype) {
        case DS_FLOAT32: walk<N, DS_FLOAT32>(layer, item, row, scratch); break;
        case DS_BFLOAT16: walk<N, DS_BFLOAT16>(layer, item, row, scratch); break;
        default: walk<N, DS_FLOAT16>(layer, item, row, scratch); break;
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
static bool own_rows(const ds_step &step) { return step.rows == step.piece_count && step.rows <= ds::kOwnRows; }

void ds::attention(const ds_paged_layer &layer, const ds_step &step, const Team &team) {
    static thread_local Scratch scratch;
    const int64_t group = layer.heads / layer.kv_heads;
    const auto tiles_of = [&](const ds_paged_piece &piece) { return (piece.count * group + kRows - 1) / kRows; };
    int64_t units = 0, p = 0, first = 0;
    for (int64_t i = 0; i < step.piece_count; ++i) units += layer.kv_heads * tiles_of(step.pieces[i]);
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
