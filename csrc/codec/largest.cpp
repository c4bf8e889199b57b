// Packets of the elements with the largest magnitudes, and their places (deepspeed/comm/codecs.py).
//
// Magnitudes are compared as integers, the bits of a float without its sign: a NaN is the largest, and every order of
// comparisons finds the same. A sample tells about where the limit is. One pass over memory, which adds errors as well,
// collects what is above that, a little more than needed, and the limit is looked for among those. Where the sample was
// wrong, the digits of all elements are counted to find it.
#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <new>

#include "kernel.h"
#include "large_pages.h"

#if defined(__GNUC__) && defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kLook = 16;             // elements that are looked at together
constexpr int64_t kRuns = 1024, kRun = 16;  // of the sample: whole lines of the cache
constexpr int64_t kLeastNumel = 4 * kRuns * kRun;  // below this, all elements are collected
constexpr int64_t kSpare = 4096;          // elements that may be collected besides a multiple of those wanted
constexpr int64_t kFetch = 1024;          // elements behind those that are on their way to the cache
constexpr int64_t kAhead = 32;            // taken elements whose errors are on their way to the cache
constexpr uint32_t kNothing = 1u << 31;  // no magnitude is as large

struct Row {
    const void *values;
    int32_t dtype;
    float *errors;  // or null
    int64_t numel;
    bool added;     // errors are values with errors already
};

struct Share {  // what one thread collects
    float *values;
    int32_t *places;
    int64_t capacity, count;  // as many as there were; those behind `capacity`, and kLook more, are not kept

    // Where the next kLook may be written.
    DS_INLINE_MEMBER int64_t end() const { return count < capacity ? count : capacity; }
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

// A bit for each of kLook numbers whose magnitude is at least `least`, which is positive. Of x + errors with `kErrors`, which
// are kept there.
template <bool kErrors>
DS_INLINE uint32_t large_ones(const float *x, float *errors, uint32_t least) {
    uint32_t bits = 0;
#if defined(__SSE2__)
    const __m128i magnitude = _mm_set1_epi32(0x7fffffff), below = _mm_set1_epi32(int32_t(least - 1));
    __m128i large[4];
    for (int i = 0; i < 4; ++i) {
        __m128 four = _mm_loadu_ps(x + 4 * i);
        if constexpr (kErrors) {
            four = _mm_add_ps(four, _mm_loadu_ps(errors + 4 * i));
            _mm_storeu_ps(errors + 4 * i, four);
        }
        large[i] = _mm_cmpgt_epi32(_mm_and_si128(_mm_castps_si128(four), magnitude), below);
    }
    const __m128i low = _mm_packs_epi32(large[0], large[1]), high = _mm_packs_epi32(large[2], large[3]);
    bits = uint32_t(_mm_movemask_epi8(_mm_packs_epi16(low, high)));
#else
    for (uint32_t i = 0; i < kLook; ++i) {
        if constexpr (kErrors) errors[i] = x[i] + errors[i];
        bits |= uint32_t(key_of((kErrors ? errors : x)[i]) >= least) << i;
    }
#endif
    return bits;
}

// Elements [0, n) of x, whose places begin at `place`. With `errors`, x + errors are looked at, and kept there.
template <bool kErrors>
DS_INLINE void look(Share &share, const float *x, float *errors, int64_t place, int64_t n, uint32_t least) {
    const float *looked = kErrors ? errors : x;
    int64_t i = 0;
    for (; least > 0 && i + kLook <= n; i += kLook) {
        if constexpr (kErrors) {
            ds::fetch<false>(x + i + kFetch, 4);
            ds::fetch<true>(errors + i + kFetch, 4);
        }
        for (uint32_t bits = large_ones<kErrors>(x + i, kErrors ? errors + i : nullptr, least); bits != 0; bits &= bits - 1) {
            const int64_t to = share.end(), from = i + std::countr_zero(bits);
            share.values[to] = looked[from];
            share.places[to] = int32_t(place + from);
            ++share.count;
        }
    }
    for (; i < n; ++i) {
        if constexpr (kErrors) errors[i] = x[i] + errors[i];
        if (key_of(looked[i]) < least) continue;
        const int64_t to = share.end();
        share.values[to] = looked[i];
        share.places[to] = int32_t(place + i);
        ++share.count;
    }
}

#if defined(__GNUC__) && defined(__x86_64__)
// The same without branches: what is large is moved to the front of a register.
template <bool kErrors>
__attribute__((target("arch=x86-64-v4"))) inline void look_avx512(Share &share, const float *x, float *errors, int64_t place,
                                                                  int64_t n, uint32_t least) {
    const __m512i bound = _mm512_set1_epi32(int32_t(least)), magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512i order = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    Share own = share;
    int64_t i = 0;
    for (; i + kLook <= n; i += kLook) {
        __m512 some = _mm512_loadu_ps(x + i);
        if constexpr (kErrors) {
            ds::fetch<false>(x + i + kFetch, 4);
            ds::fetch<true>(errors + i + kFetch, 4);
            some = _mm512_add_ps(some, _mm512_loadu_ps(errors + i));
            _mm512_storeu_ps(errors + i, some);
        }
        const __m512i bits = _mm512_castps_si512(some);
        const __mmask16 large = _mm512_cmpge_epu32_mask(_mm512_and_si512(bits, magnitude), bound);
        const __m512i places = _mm512_add_epi32(order, _mm512_set1_epi32(int32_t(place + i)));
        const int64_t to = own.end();
        _mm512_storeu_si512(own.values + to, _mm512_maskz_compress_epi32(large, bits));
        _mm512_storeu_si512(own.places + to, _mm512_maskz_compress_epi32(large, places));
        own.count += std::popcount(uint32_t(large));
    }
    share.count = own.count;
    look<kErrors>(share, x + i, kErrors ? errors + i : nullptr, place + i, n - i, least);
}
#endif

template <int N, bool kErrors>
DS_INLINE void look_with(Share &share, const float *x, float *errors, int64_t place, int64_t n, uint32_t least) {
#if defined(__GNUC__) && defined(__x86_64__)
    if constexpr (N == 16) return look_avx512<kErrors>(share, x, errors, place, n, least);
#endif
    look<kErrors>(share, x, errors, place, n, least);
}

template <int N>
DS_INLINE void collect_body(const Row &row, int64_t begin, int64_t end, uint32_t least, Share &share) {
    alignas(64) float buffer[ds::kBlock];
    Share own = share;
    if (row.dtype == DS_FLOAT32 && row.errors != nullptr && !row.added) {  // in one pass
        const float *values = static_cast<const float *>(row.values) + begin;
        look_with<N, true>(own, values, row.errors + begin, begin, end - begin, least);
        share = own;
        return;
    }
    for (int64_t index = begin; index < end; index += ds::kBlock) {
        const int64_t n = end - index < ds::kBlock ? end - index : ds::kBlock;
        look_with<N, false>(own, wanted(row, index, n, buffer), nullptr, index, n, least);
    }
    share = own;
}

DS_LANES_KERNEL(collect, (const Row &row, int64_t begin, int64_t end, uint32_t least, Share &share),
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

// Counts how many keys lie in each of a row of equal ranges, then in equal parts of the range that holds the limit, until
// this is a single key. `keys(f)` calls f(key) for each. None of them is below `least`. If that is positive, it is about
// what the limit is: the first ranges are narrow, so that counters differ from key to key, and the last one has no end.
template <class Keys>
Limit limit_of(Keys &&keys, int64_t count, uint32_t least) {
    constexpr int32_t kDigit = 12, kOctave = 23, kAll = 31;  // bits: of a range's number, and of the keys of several ranges
    std::array<int64_t, 1 << kDigit> counts;
    bool open = least > 0;
    for (int32_t width = open ? kOctave : kAll;;) {
        const int32_t shift = width < kDigit ? 0 : width - kDigit;
        const uint32_t last = (1u << (width - shift)) - 1;
        counts.fill(0);
        keys([&](uint32_t key) {
            const uint32_t range = (key - least) >> shift;  // large if the key is below
            if (range <= last) ++counts[range];
            else if (open) ++counts[last];
        });
        uint32_t range = last;
        for (; counts[range] < count; --range) count -= counts[range];
        const bool endless = open && range == last;
        least += range << shift;
        if (shift == 0 && !endless) return {least, count};
        width = endless ? kAll : shift;
        open = false;
    }
}

// Writes what is taken, in the order of places.
class Packet {
  public:
    Packet(void *memory, int64_t count, Limit limit)
        : values(static_cast<char *>(memory)), places(values + 4 * count), size(count), limit(limit) {}

    bool full() const { return count == size; }

    // Only while it is not full. Which are taken cannot be foreseen: all are written, and the others overwritten.
    void offer(float value, int32_t place) {
        const uint32_t key = key_of(value);
        std::memcpy(values + 4 * count, &value, 4);
        std::memcpy(places + 4 * count, &place, 4);
        count += key > limit.key;
        if (key == limit.key) [[unlikely]]
            count += limit.equal-- > 0;
    }

    // What is left of those that are in it.
    void settle(float *errors) const {
        for (int64_t i = 0; i < count; ++i) {
            if (i + kAhead < count) ds::fetch<true>(errors + place_at(i + kAhead), 4);
            float value;
            std::memcpy(&value, values + 4 * i, 4);
            errors[place_at(i)] = value - value;  // NaN if it is not finite
        }
    }

  private:
    int32_t place_at(int64_t i) const {
        int32_t place;
        std::memcpy(&place, places + 4 * i, 4);
        return place;
    }

    char *values, *places;
    int64_t size;
    Limit limit;
    int64_t count = 0;
};

void take_from_all(const Row &row, int64_t count, void *packet) {
    const Limit limit = limit_of(
        [&](auto &&f) {
            for (int64_t i = 0; i < row.numel; ++i) f(key_of(value_at(row, i)));
        },
        count, 0);
    Packet to(packet, count, limit);
    for (int64_t i = 0; i < row.numel && !to.full(); ++i) to.offer(value_at(row, i), int32_t(i));
    if (row.errors != nullptr) to.settle(row.errors);
}

struct Aligned {
    std::align_val_t alignment;
    void operator()(char *memory) const { ::operator delete(memory, alignment); }
};

// What rows need besides, one after the other.
struct Scratch {
    const int32_t threads;
    const int64_t capacity;  // of a thread
    const std::unique_ptr<Share[]> shares;
    const std::unique_ptr<uint32_t[]> sample;
    std::unique_ptr<char, Aligned> memory;  // of the shares: filled anew by each call, see [Note: large pages]

    Scratch(int64_t numel, int64_t count, int32_t threads)
        : threads(numel < ds::kParallelNumel || threads < 1 ? 1 : threads),
          capacity(capacity_of(numel, count, this->threads)),
          shares(new (std::nothrow) Share[size_t(this->threads)]),
          sample(new (std::nothrow) uint32_t[kRuns * kRun]) {
        int64_t bytes = 8 * room() * this->threads;
        const int64_t page = bytes < ds::kLargePage / 2 ? int64_t(64) : ds::kLargePage;
        bytes = (bytes + page - 1) / page * page;
        const std::align_val_t alignment{size_t(page)};
        memory = {static_cast<char *>(::operator new(size_t(bytes), alignment, std::nothrow)), {alignment}};
        ds::ask_for_large_pages(memory.get(), bytes, ds::kLargePage);
    }

    static int64_t capacity_of(int64_t numel, int64_t count, int32_t threads) {
        const int64_t capacity = (2 * count + kSpare) / threads + kSpare;
        return numel < kLeastNumel || capacity > numel ? numel : capacity;
    }

    int64_t room() const { return capacity + kLook; }

    bool ready() const { return memory != nullptr && shares != nullptr && sample != nullptr; }

    Share empty_share(int32_t thread) const {
        char *own = memory.get() + 8 * room() * thread;
        return {reinterpret_cast<float *>(own), reinterpret_cast<int32_t *>(own + 4 * room()), capacity, 0};
    }
};

void encode_row(Row row, int64_t count, void *packet, const Scratch &scratch) {
    const int32_t threads = scratch.threads;
    const int64_t capacity = scratch.capacity, blocks = ds::block_count(row.numel);
    uint32_t least = guess(row, count, scratch.sample.get());
    if (least == 0 && capacity < row.numel) least = kNothing;
    const auto run = [&](int32_t t) {
        const int64_t begin = blocks * t / threads * ds::kBlock, end = blocks * (t + 1) / threads * ds::kBlock;
        scratch.shares[t] = scratch.empty_share(t);
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
    const Limit limit = limit_of(
        [&](auto &&f) {
            for (int32_t t = 0; t < threads; ++t)
                for (int64_t i = 0; i < scratch.shares[t].count; ++i) f(key_of(scratch.shares[t].values[i]));
        },
        count, least);
    Packet to(packet, count, limit);
    for (int32_t t = 0; t < threads; ++t) {
        const Share &share = scratch.shares[t];
        for (int64_t i = 0; i < share.count && !to.full(); ++i) to.offer(share.values[i], share.places[i]);
    }
    if (row.errors != nullptr) to.settle(row.errors);
}

void clear(float *values, int64_t numel, int32_t threads) {
    ds::for_each_share(numel, numel, threads, [&](int64_t begin, int64_t end) {
        std::memset(values + begin, 0, size_t(end - begin) * sizeof(float));
    });
}

}  // namespace

int32_t ds_encode_largest(void *packets, int64_t rows, int64_t numel, int64_t count, const void *values, int32_t dtype,
                          float *errors, int32_t threads) {
    const Scratch scratch(numel, count, threads);
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
