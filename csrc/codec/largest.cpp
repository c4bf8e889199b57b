// Payloads of the elements with the largest magnitudes, and their places (deepspeed/ops/formats/codecs.py).
//
// Magnitudes are compared as integers, the bits of a float without its sign: a NaN is the largest, and every order of
// comparisons finds the same. A sample tells about where the limit is. One pass over memory, which adds errors as well,
// collects what is above that, a little more than needed, and clears the errors of these. The limit is looked for among
// them, and those that are not taken get their errors back: they are few, while all that are taken would be many to clear
// one by one. Where the sample was wrong, the digits of all elements are counted to find the limit.
#include <array>
#include <memory>
#include <new>

#include "kernel.h"
#include "large_pages.h"

#if defined(__GNUC__) && defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kLook = 16;             // elements that are looked at together
constexpr int64_t kRuns = 2048, kRun = 16;  // of the sample: whole lines of the cache
constexpr int64_t kLeastNumel = 4 * kRuns * kRun;  // below this, all elements are collected
constexpr int64_t kSpare = 4096;          // elements that may be collected besides a multiple of those wanted
constexpr int64_t kFetch = 256;           // elements behind those that are on their way to the cache
constexpr int64_t kAhead = 32;            // places, or runs, whose elements are on their way to the cache
constexpr uint32_t kNothing = 1u << 31;  // no magnitude is as large

struct Row {
    const void *values;
    int32_t dtype;
    float *errors;  // or null
    int64_t numel;
};

// What one thread collects. Memory has room for kLook more than `capacity`.
struct Share {
    float *values;
    int32_t *places;
    int64_t capacity;
    int64_t count, kept;  // how many there were, and those in memory: all of the first `capacity` or a few more

    bool lost() const { return kept < count; }

    // Whether the next kLook may be written.
    DS_INLINE_MEMBER bool has_room() const { return count < capacity; }

    // An element whose error, if there is one, goes along with it.
    DS_INLINE_MEMBER void add(float value, int32_t place, float *error) {
        if (has_room()) {
            values[count] = value;
            places[count] = place;
            kept = count + 1;
            if (error != nullptr) *error = value - value;  // NaN if it is not finite
        }
        ++count;
    }
};

DS_INLINE uint32_t key_of(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffffu; }

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
    const auto add = [&](int64_t i) { share.add(looked[i], int32_t(place + i), kErrors ? errors + i : nullptr); };
    int64_t i = 0;
    for (; least > 0 && i + kLook <= n; i += kLook) {
        if constexpr (kErrors) {
            ds::ask_for(x + i + kFetch);
            ds::ask_for(errors + i + kFetch);
        }
        for (uint32_t bits = large_ones<kErrors>(x + i, kErrors ? errors + i : nullptr, least); bits != 0; bits &= bits - 1)
            add(i + std::countr_zero(bits));
    }
    for (; i < n; ++i) {
        if constexpr (kErrors) errors[i] = x[i] + errors[i];
        if (key_of(looked[i]) >= least) add(i);
    }
}

#if defined(__GNUC__) && defined(__x86_64__)
// The first numbers of a register, `count` of them and perhaps more. Where they are few, which is the rule, few bytes are
// written: most stores of whole registers would touch two lines.
__attribute__((target("arch=x86-64-v4"))) inline void store_first(void *to, __m512i x, int count) {
    if (count > 4) [[unlikely]]
        std::memcpy(to, &x, sizeof x);
    else
        std::memcpy(to, &x, sizeof x / 4);
}

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
            ds::ask_for(x + i + kFetch);
            ds::ask_for(errors + i + kFetch);
            some = _mm512_add_ps(some, _mm512_loadu_ps(errors + i));
        }
        const __m512i bits = _mm512_castps_si512(some);
        const __mmask16 large = _mm512_cmpge_epu32_mask(_mm512_and_si512(bits, magnitude), bound);
        const int count = std::popcount(uint32_t(large));
        const bool room = own.has_room();
        if (room) {
            const __m512i places = _mm512_add_epi32(order, _mm512_set1_epi32(int32_t(place + i)));
            store_first(own.values + own.count, _mm512_maskz_compress_epi32(large, bits), count);
            store_first(own.places + own.count, _mm512_maskz_compress_epi32(large, places), count);
        }
        own.count += count;
        if (room) own.kept = own.count;
        if constexpr (kErrors) _mm512_storeu_ps(errors + i, _mm512_mask_sub_ps(some, room ? large : 0, some, some));
    }
    share = own;
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
    const int64_t most = row.dtype == DS_FLOAT32 ? end - begin : ds::kBlock;
    for (int64_t index = begin; index < end; index += most) {
        const int64_t n = end - index < most ? end - index : most;
        const float *x = ds::widen(ds::at(row.values, index, row.dtype), row.dtype, buffer, n);
        if (row.errors == nullptr) look_with<N, false>(own, x, nullptr, index, n, least);
        else look_with<N, true>(own, x, row.errors + index, index, n, least);
    }
    share = own;
}

DS_LANES_KERNEL(collect, (const Row &row, int64_t begin, int64_t end, uint32_t least, Share &share),
                (row, begin, end, least, share))

// Once what is owed was added where the errors are.
float value_at(const Row &row, int64_t place) {
    float buffer;
    if (row.errors != nullptr) return row.errors[place];
    return *ds::widen(ds::at(row.values, place, row.dtype), row.dtype, &buffer, 1);
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

// The first element of one of the sample's runs, which are spread without a period.
DS_INLINE int64_t run_at(const Row &row, int64_t run) {
    const uint64_t part = uint64_t(run) * 0x9e3779b97f4a7c15u >> 32;
    return int64_t(part * uint64_t(row.numel / kRun) >> 32) * kRun;
}

// About how large the `count`-th largest is, a little less. 0: everything may be needed.
uint32_t guess(const Row &row, int64_t count, uint32_t *keys) {
    constexpr int64_t size = kRuns * kRun;
    if (row.numel < kLeastNumel) return 0;
    const double share = double(count) / double(row.numel);
    const int64_t rank = int64_t(1.15 * share * double(size)) + 48;
    if (rank > size) return 0;
    for (int64_t run = 0; run < kRuns; ++run) {
        const int64_t next = run_at(row, run + kAhead), first = run_at(row, run);
        ds::ask_for(ds::at(row.values, next, row.dtype));
        if (row.errors != nullptr) ds::ask_for(row.errors + next);
        float buffer[kRun];
        const float *x = ds::widen(ds::at(row.values, first, row.dtype), row.dtype, buffer, kRun);
        for (int64_t i = 0; i < kRun; ++i)
            keys[run * kRun + i] = key_of(row.errors == nullptr ? x[i] : x[i] + row.errors[first + i]);
    }
    return limit_of(
               [&](auto &&f) {
                   for (int64_t i = 0; i < size; ++i) f(keys[i]);
               },
               rank, 0)
        .key;
}

// Writes what is taken, in the order of places.
struct Payload {
    char *values, *places;
    int64_t size;
    Limit limit;
    int64_t count;

    Payload(void *memory, int64_t size, Limit limit)
        : values(static_cast<char *>(memory)), places(values + 4 * size), size(size), limit(limit), count(0) {}

    DS_INLINE_MEMBER bool takes(float value) {
        const uint32_t key = key_of(value);
        if (key == limit.key) [[unlikely]]
            return limit.equal-- > 0;
        return key > limit.key;
    }

    DS_INLINE_MEMBER void add(float value, int32_t place) {
        std::memcpy(values + 4 * count, &value, 4);
        std::memcpy(places + 4 * count, &place, 4);
        ++count;
    }
};

DS_INLINE void take_each(Payload &payload, Share &share, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        const float value = share.values[i];
        const int32_t place = share.places[i];
        if (payload.takes(value)) {
            payload.add(value, place);
        } else {
            share.values[share.kept] = value;
            share.places[share.kept++] = place;
        }
    }
}

#if defined(__GNUC__) && defined(__x86_64__)
__attribute__((target("arch=x86-64-v4"))) inline int64_t take_avx512(Payload &payload, Share &share, int64_t end) {
    const __m512i limit = _mm512_set1_epi32(int32_t(payload.limit.key)), magnitude = _mm512_set1_epi32(0x7fffffff);
    int64_t i = 0;
    for (; i + kLook <= end && payload.count + kLook <= payload.size; i += kLook) {
        const __m512i values = _mm512_loadu_si512(share.values + i), places = _mm512_loadu_si512(share.places + i);
        const __m512i keys = _mm512_and_si512(values, magnitude);
        if (_mm512_cmpeq_epi32_mask(keys, limit) != 0) [[unlikely]] {
            take_each(payload, share, i, i + kLook);
            continue;
        }
        const __mmask16 taken = _mm512_cmpgt_epi32_mask(keys, limit), left = __mmask16(~taken);
        _mm512_storeu_si512(payload.values + 4 * payload.count, _mm512_maskz_compress_epi32(taken, values));
        _mm512_storeu_si512(payload.places + 4 * payload.count, _mm512_maskz_compress_epi32(taken, places));
        _mm512_storeu_si512(share.values + share.kept, _mm512_maskz_compress_epi32(left, values));
        _mm512_storeu_si512(share.places + share.kept, _mm512_maskz_compress_epi32(left, places));
        payload.count += std::popcount(uint32_t(taken));
        share.kept += std::popcount(uint32_t(left));
    }
    return i;
}
#endif

// Those of a share that the payload takes. The others move to the share's front.
template <int N>
DS_INLINE void take_body(Payload &payload, Share &share) {
    const int64_t end = share.kept;
    int64_t begin = 0;
    share.kept = 0;
#if defined(__GNUC__) && defined(__x86_64__)
    if constexpr (N == 16) begin = take_avx512(payload, share, end);
#endif
    take_each(payload, share, begin, end);
}

DS_LANES_KERNEL(take, (Payload &payload, Share &share), (payload, share))

// The errors of what is still in a share.
void put_back(const Share &share, float *errors) {
    for (int64_t i = 0; i < share.kept; ++i) {
        if (i + kAhead < share.kept) ds::ask_for(errors + share.places[i + kAhead]);
        errors[share.places[i]] = share.values[i];
    }
}

void take_from_all(const Row &row, int64_t count, void *memory) {
    const Limit limit = limit_of(
        [&](auto &&f) {
            for (int64_t i = 0; i < row.numel; ++i) f(key_of(value_at(row, i)));
        },
        count, 0);
    Payload payload(memory, count, limit);
    for (int64_t i = 0; i < row.numel; ++i) {
        const float value = value_at(row, i);
        if (!payload.takes(value)) continue;
        payload.add(value, int32_t(i));
        if (row.errors != nullptr) row.errors[i] = value - value;
    }
}

struct Aligned {
    std::align_val_t alignment;
    void operator()(char *memory) const { ::operator delete(memory, alignment); }
};
using Memory = std::unique_ptr<char, Aligned>;

// Null if there is not enough.
Memory memory_of(int64_t bytes) {
    const int64_t page = bytes < ds::kLargePage / 2 ? int64_t(64) : ds::kLargePage;
    bytes = (bytes + page - 1) / page * page;
    const std::align_val_t alignment{size_t(page)};
    Memory memory(static_cast<char *>(::operator new(size_t(bytes), alignment, std::nothrow)), {alignment});
    ds::ask_for_large_pages(memory.get(), bytes, ds::kLargePage);
    return memory;
}

// Of a thread that encodes, from call to call: pages that are new cost as much as all that is done with what they hold.
struct Kept {
    Memory memory{nullptr, {std::align_val_t{64}}};
    int64_t bytes = 0;

    char *at_least(int64_t wanted) {
        if (wanted > bytes) {
            memory = memory_of(wanted);
            bytes = memory == nullptr ? 0 : wanted;
        }
        return memory.get();
    }
};
constexpr int64_t kMostKept = int64_t(8) << 20;  // bytes; for more, pages are had anew each time
thread_local Kept kept;

// What rows need besides, one after the other.
struct Scratch {
    const int32_t threads;
    const int64_t capacity;  // of a thread
    const std::unique_ptr<Share[]> shares;
    const std::unique_ptr<uint32_t[]> sample;
    Memory large{nullptr, {std::align_val_t{64}}};  // too large to be kept
    char *memory;                                   // of the shares

    Scratch(int64_t numel, int64_t count, int32_t threads)
        : threads(numel < ds::kParallelNumel || threads < 1 ? 1 : threads),
          capacity(capacity_of(numel, count, this->threads)),
          shares(new (std::nothrow) Share[size_t(this->threads)]),
          sample(new (std::nothrow) uint32_t[kRuns * kRun]) {
        const int64_t bytes = 8 * room() * this->threads;
        if (bytes > kMostKept) large = memory_of(bytes);
        memory = bytes > kMostKept ? large.get() : kept.at_least(bytes);
    }

    static int64_t capacity_of(int64_t numel, int64_t count, int32_t threads) {
        const int64_t capacity = (2 * count + kSpare) / threads + kSpare;
        return numel < kLeastNumel || capacity > numel ? numel : capacity;
    }

    int64_t room() const { return capacity + kLook; }

    bool ready() const { return memory != nullptr && shares != nullptr && sample != nullptr; }

    Share empty_share(int32_t thread) const {
        char *own = memory + 8 * room() * thread;
        return {reinterpret_cast<float *>(own), reinterpret_cast<int32_t *>(own + 4 * room()), capacity, 0, 0};
    }
};

void encode_row(const Row &row, int64_t count, void *payload, const Scratch &scratch) {
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
    int64_t total = 0;
    bool fits = true;
    for (int32_t t = 0; t < threads; ++t) {
        total += scratch.shares[t].count;
        fits = fits && !scratch.shares[t].lost();
    }
    const auto put_all_back = [&] {
        if (row.errors == nullptr) return;
        for (int32_t t = 0; t < threads; ++t) put_back(scratch.shares[t], row.errors);
    };
    if (!fits || total < count) {
        put_all_back();
        return take_from_all(row, count, payload);
    }
    const Limit limit = limit_of(
        [&](auto &&f) {
            for (int32_t t = 0; t < threads; ++t)
                for (int64_t i = 0; i < scratch.shares[t].kept; ++i) f(key_of(scratch.shares[t].values[i]));
        },
        count, least);
    Payload to(payload, count, limit);
    for (int32_t t = 0; t < threads; ++t) take(to, scratch.shares[t]);
    put_all_back();
}

void clear(float *values, int64_t numel, int32_t threads) {
    ds::for_each_share(numel, numel, threads, [&](int64_t begin, int64_t end) {
        std::memset(values + begin, 0, size_t(end - begin) * sizeof(float));
    });
}

}  // namespace

int32_t ds_encode_largest(void *payloads, int64_t rows, int64_t numel, int64_t count, const void *values, int32_t dtype,
                          float *errors, int32_t threads) {
    const Scratch scratch(numel, count, threads);
    if (!scratch.ready()) return 0;
    for (int64_t r = 0; r < rows; ++r) {
        const Row row{ds::at(values, r * numel, dtype), dtype, errors == nullptr ? nullptr : errors + r * numel, numel};
        encode_row(row, count, static_cast<char *>(payloads) + 8 * count * r, scratch);
    }
    return 1;
}

void ds_decode_largest(const void *payloads, int64_t rows, int64_t numel, int64_t count, float *values, int32_t sum,
                       int32_t threads) {
    clear(values, sum ? numel : rows * numel, threads);
    for (int64_t r = 0; r < rows; ++r) {
        const char *chosen = static_cast<const char *>(payloads) + 8 * count * r, *places = chosen + 4 * count;
        float *row = sum ? values : values + r * numel;
        for (int64_t i = 0; i < count; ++i) {
            uint32_t place;
            float value;
            std::memcpy(&place, places + 4 * i, 4);
            std::memcpy(&value, chosen + 4 * i, 4);
            if (place >= uint64_t(numel)) continue;  // no payload of ours
            row[place] = sum ? row[place] + value : value;
        }
    }
}
