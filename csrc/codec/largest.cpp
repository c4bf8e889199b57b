// Packets of the elements with the largest magnitudes, and their places (deepspeed/comm/codecs.py).
//
// Magnitudes are compared as integers, the bits of a float without its sign: a NaN is the largest, and every order of
// comparisons finds the same. A sample tells about where the limit is. One pass over memory, which adds errors as well,
// collects what is above that, a little more than needed, and the limit is looked for among those. Where the sample was
// wrong, the digits of all elements are counted to find it.
#include <algorithm>
#include <functional>
#include <iterator>
#include <memory>
#include <new>

#include "kernel.h"

namespace {

constexpr int64_t kLook = 32;             // elements that are looked at together: most such runs have nothing large
constexpr int64_t kRuns = 1024, kRun = 16;  // of the sample: whole lines of the cache
constexpr int64_t kLeastNumel = 4 * kRuns * kRun;  // below this, all elements are collected
constexpr int64_t kSpare = 4096;          // elements that may be collected besides a multiple of those wanted
constexpr uint32_t kNothing = ~0u;        // no magnitude is as large

struct Row {
    const void *values;
    int32_t dtype;
    float *errors;  // or null
    int64_t numel;
    bool added;     // errors are values with errors already
};

struct Found {
    uint32_t key;
    int32_t place;
};

struct Share {  // what one thread collects
    Found *found;
    int64_t capacity, count;  // as many as there were, more than `capacity` if they were too many
};

DS_INLINE uint32_t key_of(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffffu; }

// Elements [index, index + n) with the errors that are owed, which are kept where the errors are.
DS_INLINE const float *wanted(const Row &row, int64_t index, int64_t n, float *buffer) {
    float *errors = row.errors == nullptr ? nullptr : row.errors + index;
    if (row.added) return errors;
    const float *values = ds::widen(ds::at(row.values, index, row.dtype), row.dtype, buffer, n);
    if (errors == nullptr) return values;
    DS_IVDEP for (int64_t i = 0; i < n; ++i) errors[i] = values[i] + errors[i];
    return errors;
}

DS_INLINE uint32_t largest_of(const float *x) {
    int32_t largest = 0;
    for (int64_t i = 0; i < kLook; ++i) {
        const int32_t bits = int32_t(key_of(x[i]));
        largest = bits > largest ? bits : largest;
    }
    return uint32_t(largest);
}

DS_INLINE void look(Share &share, const float *x, int64_t place, int64_t n, uint32_t least) {
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t key = key_of(x[i]);
        if (key < least) continue;
        if (share.count < share.capacity) share.found[share.count] = {key, int32_t(place + i)};
        ++share.count;
    }
}

DS_INLINE void collect_body(const Row &row, int64_t begin, int64_t end, uint32_t least, Share &share) {
    alignas(64) float buffer[ds::kBlock];
    Share own = share;
    for (int64_t index = begin; index < end; index += ds::kBlock) {
        const int64_t n = end - index < ds::kBlock ? end - index : ds::kBlock;
        const float *x = wanted(row, index, n, buffer);
        int64_t i = 0;
        for (; i + kLook <= n; i += kLook)
            if (largest_of(x + i) >= least) look(own, x + i, index + i, kLook, least);
        look(own, x + i, index + i, n - i, least);
    }
    share = own;
}

DS_KERNEL(collect, (const Row &row, int64_t begin, int64_t end, uint32_t least, Share &share),
          (row, begin, end, least, share))

float value_at(const Row &row, int64_t place) {
    float buffer;
    if (row.added) return row.errors[place];
    return *ds::widen(ds::at(row.values, place, row.dtype), row.dtype, &buffer, 1);
}

// About how large the `count`-th largest is, a little less. 0: everything may be needed.
uint32_t guess(const Row &row, int64_t count, uint32_t *keys) {
    constexpr int64_t size = kRuns * kRun;
    if (row.numel < kLeastNumel) return 0;
    for (int64_t run = 0; run < kRuns; ++run) {  // spread without a period
        const uint64_t part = uint64_t(run) * 0x9e3779b97f4a7c15u >> 32;
        const int64_t first = int64_t(part * uint64_t(row.numel / kRun) >> 32) * kRun;
        for (int64_t i = 0; i < kRun; ++i) {
            float x = value_at(row, first + i);
            if (row.errors != nullptr && !row.added) x += row.errors[first + i];
            keys[run * kRun + i] = key_of(x);
        }
    }
    const double share = double(count) / double(row.numel);
    const int64_t rank = int64_t(1.3 * share * double(size)) + 64;
    if (rank >= size) return 0;
    std::nth_element(keys, keys + rank, keys + size, std::greater<>());
    return keys[rank];
}

struct Limit {
    uint32_t key;   // all that are larger are taken,
    int64_t equal;  // and so many of those that are equal
};

// By the counts of their digits, the highest first. `keys(f)` calls f(key) for each.
template <class Keys>
Limit limit_of(Keys &&keys, int64_t count) {
    constexpr int32_t shifts[] = {20, 10, 0};
    int64_t counts[1 << 11];
    uint32_t known = 0;  // digits of the limit so far
    for (const int32_t shift : shifts) {
        std::fill(std::begin(counts), std::end(counts), int64_t(0));
        if (shift == 20) {
            keys([&](uint32_t key) { ++counts[key >> 20]; });
        } else {
            keys([&](uint32_t key) {
                if (key >> (shift + 10) == known) ++counts[(key >> shift) & 1023];
            });
        }
        uint32_t digit = shift == 20 ? (1u << 11) - 1 : 1023;
        for (; counts[digit] < count; --digit) count -= counts[digit];
        known = known << (shift == 20 ? 0 : 10) | digit;
    }
    return {known, count};
}

// Writes what is taken, in the order of places.
class Packet {
  public:
    Packet(void *memory, int64_t count, const Row &row, Limit limit)
        : values(static_cast<char *>(memory)), places(values + 4 * count), row(row), limit(limit) {}

    void offer(uint32_t key, int32_t place) {
        if (key < limit.key || (key == limit.key && limit.equal-- <= 0)) return;
        const float value = value_at(row, place);
        std::memcpy(values + 4 * count, &value, 4);
        std::memcpy(places + 4 * count, &place, 4);
        if (row.errors != nullptr) row.errors[place] = value - value;  // NaN if it is not finite
        ++count;
    }

  private:
    char *values, *places;
    const Row &row;
    Limit limit;
    int64_t count = 0;
};

void take_from_all(const Row &row, int64_t count, void *packet) {
    const Limit limit = limit_of(
        [&](auto &&f) {
            for (int64_t i = 0; i < row.numel; ++i) f(key_of(value_at(row, i)));
        },
        count);
    Packet to(packet, count, row, limit);
    for (int64_t i = 0; i < row.numel; ++i) to.offer(key_of(value_at(row, i)), int32_t(i));
}

// What rows need besides, one after the other.
struct Scratch {
    int32_t threads;
    int64_t capacity;  // of a thread
    std::unique_ptr<Found[]> found;
    std::unique_ptr<Share[]> shares;
    std::unique_ptr<uint32_t[]> sample;
    bool ready() const { return found != nullptr && shares != nullptr && sample != nullptr; }
};

Scratch scratch_for(int64_t numel, int64_t count, int32_t threads) {
    if (numel < ds::kParallelNumel || threads < 1) threads = 1;
    int64_t capacity = (2 * count + kSpare) / threads + kSpare;
    if (numel < kLeastNumel || capacity > numel) capacity = numel;
    return {threads, capacity, std::unique_ptr<Found[]>(new (std::nothrow) Found[size_t(capacity * threads)]),
            std::unique_ptr<Share[]>(new (std::nothrow) Share[size_t(threads)]),
            std::unique_ptr<uint32_t[]>(new (std::nothrow) uint32_t[kRuns * kRun])};
}

void encode_row(Row row, int64_t count, void *packet, Scratch &scratch) {
    const int32_t threads = scratch.threads;
    const int64_t capacity = scratch.capacity, blocks = ds::block_count(row.numel);
    uint32_t least = guess(row, count, scratch.sample.get());
    if (least == 0 && capacity < row.numel) least = kNothing;
    const auto run = [&](int32_t t) {
        const int64_t begin = blocks * t / threads * ds::kBlock, end = blocks * (t + 1) / threads * ds::kBlock;
        scratch.shares[t] = {scratch.found.get() + t * capacity, capacity, 0};
        collect(row, begin, end < row.numel ? end : row.numel, least, scratch.shares[t]);
    };
    if (threads == 1) {
        run(0);
    } else {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
        for (int32_t t = 0; t < threads; ++t) run(t);
    }
    row.added = row.errors != nullptr;
    int64_t total = 0;
    bool fits = true;
    for (int32_t t = 0; t < threads; ++t) {
        total += scratch.shares[t].count;
        fits = fits && scratch.shares[t].count <= capacity;
    }
    if (!fits || total < count) return take_from_all(row, count, packet);
    const auto each = [&](auto &&f) {
        for (int32_t t = 0; t < threads; ++t)
            for (int64_t i = 0; i < scratch.shares[t].count; ++i) f(scratch.shares[t].found[i]);
    };
    const Limit limit = limit_of([&](auto &&f) { each([&](const Found &one) { f(one.key); }); }, count);
    Packet to(packet, count, row, limit);
    each([&](const Found &one) { to.offer(one.key, one.place); });
}

void clear(float *values, int64_t numel, int32_t threads) {
    ds::for_each_share(numel, numel, threads, [&](int64_t begin, int64_t end) {
        std::memset(values + begin, 0, size_t(end - begin) * sizeof(float));
    });
}

}  // namespace

int32_t ds_encode_largest(void *packets, int64_t rows, int64_t numel, int64_t count, const void *values, int32_t dtype,
                          float *errors, int32_t threads) {
    Scratch scratch = scratch_for(numel, count, threads);
    if (!scratch.ready()) return 0;
    for (int64_t r = 0; r < rows; ++r) {
        const Row row{ds::at(values, r * numel, dtype), dtype, errors == nullptr ? nullptr : errors + r * numel, numel,
                      false};
        encode_row(row, count, static_cast<char *>(packets) + 8 * count * r, scratch);
    }
    return 1;
}

void ds_decode_largest(const void *packets, int64_t rows, int64_t numel, int64_t count, float *values, int32_t sum,
                       int32_t threads) {
    clear(values, sum ? numel : rows * numel, threads);
    for (int64_t r = 0; r < rows; ++r) {
        const char *chosen = static_cast<const char *>(packets) + 8 * count * r, *places = chosen + 4 * count;
        float *row = sum ? values : values + r * numel;
        for (int64_t i = 0; i < count; ++i) {
            uint32_t place;
            float value;
            std::memcpy(&place, places + 4 * i, 4);
            std::memcpy(&value, chosen + 4 * i, 4);
            if (place >= uint64_t(numel)) continue;  // no packet of ours
            row[place] = sum ? row[place] + value : value;
        }
    }
}
