// Attention of a few tokens of each of many sequences over a paged cache, which is read in place.
//
// A work item is one sequence, one head of keys, and a tile of its rows, which are the query heads that share the head, of
// all tokens. It walks the sequence block by block (M. Milakov, N. Gimelshein: Online normalizer calculation for
// softmax, 2018), so that each key and value is read once for all rows of the tile.
//
// Keys lie transposed in the cache, one number of all tokens of a block beside each other: the scores of kLanes tokens are
// one chain of additions per lane (lanes.h), and no sum goes across a vector.
#include <algorithm>
#include <cmath>
#include <vector>

#include "exponential.h"
#include "lanes.h"
#include "operations.h"

namespace {

using ds::exponential;
using ds::kLanes;
using ds::Lanes;
using ds::load;
using ds::store;

constexpr int64_t kRows = 16;     // of a tile
constexpr int64_t kTogether = 4;  // rows for which a key or value is loaded once

// scores[r][0..16) = query[r] times the keys of 16 tokens; `keys` [size][stride].
template <int64_t R>
DS_INLINE void score_lanes(const float *query, int64_t size, const float *keys, int64_t stride, float *scores,
                           int64_t scores_stride) {
    Lanes sums[R] = {};
    for (int64_t d = 0; d < size; ++d) {
        Lanes key;
        load(key, keys + d * stride);
        for (int64_t r = 0; r < R; ++r) sums[r] += query[r * size + d] * key;
    }
    for (int64_t r = 0; r < R; ++r) store(scores + r * scores_stride, sums[r]);
}

// sums[r] += weights[r][j] * values[j], for n tokens j.
template <int64_t R>
DS_INLINE void add_values(const float *weights, int64_t weights_stride, const float *values, int64_t n, int64_t size,
                          float *sums) {
    int64_t d = 0;
    for (; d + kLanes <= size; d += kLanes) {
        Lanes total[R];
        for (int64_t r = 0; r < R; ++r) load(total[r], sums + r * size + d);
        for (int64_t j = 0; j < n; ++j) {
            Lanes value;
            load(value, values + j * size + d);
            for (int64_t r = 0; r < R; ++r) total[r] += weights[r * weights_stride + j] * value;
        }
        for (int64_t r = 0; r < R; ++r) store(sums + r * size + d, total[r]);
    }
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

// `count` rows of the tile from `first` on: their scores with the keys of a block, then the block's values.
template <int64_t R>
DS_INLINE void rows_of_block(const ds_paged_layer &layer, Row *row, int64_t first, const float *keys,
                             const float *values, int64_t position, int64_t n, Scratch &scratch) {
    const int64_t size = layer.block_size, width = (size + kLanes - 1) / kLanes * kLanes;
    const float *query = scratch.query.data() + first * layer.key_size;
    float *scores = scratch.scores.data();
    float *sums = scratch.sums.data() + first * layer.value_size;
    for (int64_t j = 0; j < n; j += kLanes) {
        const float *here = keys + j;
        int64_t stride = size;
        if (j + kLanes > size) {  // a block that is no multiple of the lanes
            for (int64_t d = 0; d < layer.key_size; ++d)
                for (int64_t k = 0; k < kLanes; ++k)
                    scratch.padded[size_t(d * kLanes + k)] = j + k < size ? keys[d * size + j + k] : 0.0f;
            here = scratch.padded.data(), stride = kLanes;
        }
        score_lanes<R>(query, layer.key_size, here, stride, scores + j, width);
    }
    for (int64_t r = 0; r < R; ++r) {
        Row &own = row[first + r];
        float *score = scores + r * width;
        for (int64_t j = 0; j < n; ++j) score[j] *= layer.scale;
        if (layer.softcap > 0)
            for (int64_t j = 0; j < n; ++j) score[j] = layer.softcap * std::tanh(score[j] / layer.softcap);
        const int64_t begin = std::clamp<int64_t>(own.first - position, 0, n);
        const int64_t end = std::clamp<int64_t>(own.last + 1 - position, begin, n);
        float largest = own.largest;
        for (int64_t j = begin; j < end; ++j) largest = score[j] > largest ? score[j] : largest;
        if (largest > own.largest) {
            const float scale = own.total > 0 ? exponential(own.largest - largest) : 0.0f;
            DS_IVDEP for (int64_t d = 0; d < layer.value_size; ++d) sums[r * layer.value_size + d] *= scale;
            own.total *= scale;
            own.largest = largest;
        }
        for (int64_t j = 0; j < begin; ++j) score[j] = 0.0f;
        DS_IVDEP for (int64_t j = begin; j < end; ++j) score[j] = exponential(score[j] - largest);
        for (int64_t j = end; j < n; ++j) score[j] = 0.0f;
        for (int64_t j = begin; j < end; ++j) own.total += score[j];
    }
    add_values<R>(scores, width, values, n, layer.value_size, sums);
}

DS_INLINE void attend_body(const ds_paged_layer &layer, const Item &item, Scratch &scratch) {
    const ds_paged_piece &piece = *item.piece;
    const int64_t group = layer.heads / layer.kv_heads, size = layer.block_size, rows = item.rows;
    const int64_t width = (size + kLanes - 1) / kLanes * kLanes;
    scratch.query.resize(size_t(rows * layer.key_size));
    scratch.key.resize(size_t(size * layer.key_size));
    scratch.padded.resize(size_t(kLanes * layer.key_size));
    scratch.value.resize(size_t(size * layer.value_size));
    scratch.scores.resize(size_t(kTogether * width));
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
    for (int64_t block = row[0].first / size; block * size <= last; ++block) {
        const int64_t position = block * size, n = last - position + 1 < size ? last - position + 1 : size;
        const int64_t slot = (piece.blocks[block] * layer.kv_heads + item.head) * size;
        const float *keys = ds::widen(ds::at(static_cast<const char *>(layer.keys), slot * layer.key_size, layer.dtype),
                                      layer.dtype, scratch.key.data(), size * layer.key_size);
        const float *values =
            ds::widen(ds::at(static_cast<const char *>(layer.values), slot * layer.value_size, layer.dtype),
                      layer.dtype, scratch.value.data(), n * layer.value_size);
        int64_t r = 0;
        for (; r + kTogether <= rows; r += kTogether)
            rows_of_block<kTogether>(layer, row, r, keys, values, position, n, scratch);
        switch (rows - r) {
            case 3: rows_of_block<3>(layer, row, r, keys, values, position, n, scratch); break;
            case 2: rows_of_block<2>(layer, row, r, keys, values, position, n, scratch); break;
            case 1: rows_of_block<1>(layer, row, r, keys, values, position, n, scratch); break;
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

DS_KERNEL(attend, (const ds_paged_layer &layer, const Item &item, Scratch &scratch), (layer, item, scratch))

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
