// Payloads of a few bits per element: signs, integers of 8 or 4 bits, and 8-bit floats, each block of elements with a scale.
//
// A payload holds the scales (fp32) of all its blocks, then the codes; deepspeed/ops/formats/codecs.py says what they mean, and
// codes.h what stands for an element.
//
// Blocks come from memory once: the pass that finds the scales of a few leaves them in the first-level cache for the pass
// that encodes them. The first only reads, so that errors are written once, when they are what encoding took away.
// Meanwhile others are on their way, so that memory never waits: those behind what is encoded, as far as memory takes to
// answer, and no further; of large blocks one half of the next while the scale is looked for, and the other while the codes
// are written.
#include "codes.h"

namespace {

using ds::kPiece;

constexpr int64_t kScale = 4;     // bytes
constexpr int64_t kStep = 256;    // elements that are looked at together
constexpr int64_t kAhead = 512;   // elements whose scales are found before they are encoded
constexpr int64_t kFetch = 256;   // elements behind those that are on their way to the cache; without errors twice as many
constexpr int64_t kRing = 512;    // more than the blocks whose scales are found and that are not encoded

struct Work {
    const ds_payloads *payloads;
    void *values;
    int32_t dtype;
    float *errors;
    int64_t blocks;  // of a row
    bool sum;        // of all rows
};

DS_INLINE int32_t bits_of(const ds_payloads &p) { return p.codes & 255; }

struct Block {
    int64_t row, index, begin, numel;  // `begin`: of its elements in the row
    int64_t first;                     // of its elements in all rows
};

DS_INLINE Block block_at(const Work &work, int64_t row, int64_t index) {
    const ds_payloads &p = *work.payloads;
    const int64_t begin = index * p.block;
    const int64_t numel = p.numel - begin < p.block ? p.numel - begin : p.block;
    return {row, index, begin, numel, row * p.numel + begin};
}

DS_INLINE Block block_of(const Work &work, int64_t unit) {
    return block_at(work, unit / work.blocks, unit % work.blocks);
}

DS_INLINE Block after(const Work &work, const Block &block) {
    return block.index + 1 < work.blocks ? block_at(work, block.row, block.index + 1) : block_at(work, block.row + 1, 0);
}

DS_INLINE uint8_t *codes_of(const Work &work, int64_t row, int64_t element) {
    const ds_payloads &p = *work.payloads;
    return p.data + row * p.stride + work.blocks * kScale + element * bits_of(p) / 8;
}

DS_INLINE uint8_t *scale_of(const Work &work, const Block &block) {
    return work.payloads->data + block.row * work.payloads->stride + block.index * kScale;
}

// ---- steps ----------------------------------------------------------------------------------------------------------

// At most kStep numbers of a block as fp32: where they are, or, if they have another type or do not make whole pieces, in a
// buffer, with `padding` behind them.
DS_INLINE const float *open(const Work &work, int64_t index, int64_t n, float padding, float (&buffer)[kStep]) {
    const float *x = ds::widen(ds::at(static_cast<const void *>(work.values), index, work.dtype), work.dtype, buffer, n);
    if (n % kPiece == 0) return x;
    if (x != buffer) std::memcpy(buffer, x, size_t(n) * sizeof(float));
    for (int64_t i = n; i % kPiece != 0; ++i) buffer[i] = padding;
    return buffer;
}

DS_INLINE float *open_errors(const Work &work, int64_t index, int64_t n, float (&buffer)[kStep]) {
    float *errors = work.errors + index;
    if (n % kPiece == 0) return errors;
    std::memcpy(buffer, errors, size_t(n) * sizeof(float));
    for (int64_t i = n; i % kPiece != 0; ++i) buffer[i] = 0.0f;
    return buffer;
}

// What random bits of a block are made of: `hash`, of what it holds, its number and the seed.
DS_INLINE uint32_t key_of(const Work &work, const Block &block, uint32_t hash) {
    const uint64_t number = uint64_t(block.row) * uint64_t(work.blocks) + uint64_t(block.index);
    return ds::mix(hash + ds::mix(uint32_t(number) + ds::mix(work.payloads->seed + uint32_t(number >> 32))));
}

template <bool kErrors>
DS_INLINE void fetch_elements(const Work &work, int64_t index, int64_t n) {
    ds::ask_for(ds::at(static_cast<const void *>(work.values), index, work.dtype), n * ds::item_size(work.dtype));
    if constexpr (kErrors) ds::ask_for(work.errors + index, n * 4);
}

// Whether the elements of the next block are asked for in two halves,
DS_INLINE bool is_large(const Work &work) { return work.payloads->block > kAhead; }

// so that they are there when `block` has been passed twice. Its part of a piece, of which `passed` were before.
template <bool kErrors>
DS_INLINE void fetch_next_block(const Work &work, const Block &block, int64_t passed) {
    fetch_elements<kErrors>(work, block.first + work.payloads->block + passed / 2, kPiece / 2);
}

// Reads blocks step by step, and writes their scales.
template <class Form, int N, bool kErrors>
class Reader {
  public:
    DS_INLINE_MEMBER Reader(const Work &work, int64_t begin, int64_t end)
        : work(work), left(end - begin), block(block_of(work, begin)) {}

    // The next blocks.
    DS_INLINE_MEMBER void read(int64_t several) {
        const int64_t goal = left < several ? 0 : left - several;
        while (left > goal) step();
    }

    // Of random bits of the block that has so many blocks behind it, itself included.
    DS_INLINE_MEMBER uint32_t key(int64_t from_end) const { return Form::random ? keys[from_end % kRing] : 0; }

  private:
    DS_INLINE_MEMBER void step() {
        const int64_t n = block.numel - done < kStep ? block.numel - done : kStep, index = block.first + done;
        const float *x = open(work, index, n, 0.0f, values);
        const float *owed = kErrors ? open_errors(work, index, n, errors) : nullptr;
        const bool large = is_large(work);
        for (int64_t i = 0; i < n; i += kPiece) {
            if (large) fetch_next_block<kErrors>(work, block, done + i);
            scan.template take<kErrors>(x + i, kErrors ? owed + i : nullptr);
        }
        done += n;
        if (done < block.numel) return;
        const float scale = scan.scale(block.numel);
        std::memcpy(scale_of(work, block), &scale, kScale);
        if constexpr (Form::random) keys[left % kRing] = key_of(work, block, scan.sum_of_bits());
        scan = {};
        done = 0;
        block = after(work, block);
        --left;
    }

    const Work &work;
    int64_t left, done = 0;
    Block block;
    typename Form::template Scan<N> scan;
    alignas(64) float values[kStep], errors[kStep];
    uint32_t keys[Form::random ? kRing : 1];
};

template <class Form, int N, bool kErrors>
DS_INLINE void encode_step(const Work &work, const Block &block, int64_t first, int64_t n, float scale,
                           const ds::Divisor &divisor, uint32_t key) {
    alignas(64) float values[kStep], owed[kStep];
    alignas(64) uint8_t rest[kStep];
    const int64_t index = block.first + first;
    const bool whole = n % kPiece == 0;
    uint8_t *codes = codes_of(work, block.row, block.begin + first), *to = whole ? codes : rest;
    const float *x = open(work, index, n, Form::padding, values);
    float *errors = kErrors ? open_errors(work, index, n, owed) : nullptr;
    const bool large = is_large(work);
    constexpr int64_t ahead = kAhead + (kErrors ? kFetch : 2 * kFetch);
    for (int64_t i = 0; i < n; i += kPiece) {
        if (large) fetch_next_block<kErrors>(work, block, work.payloads->block + first + i);
        else fetch_elements<kErrors>(work, index + ahead + i, kPiece);
        uint8_t *some = to + i * Form::bits / 8;
        float *owing = kErrors ? errors + i : nullptr;
        Form::template encode<N, kErrors>(some, x + i, owing, scale, divisor, key + uint32_t(first + i));
    }
    if (whole) return;
    std::memcpy(codes, rest, size_t((n * Form::bits + 7) / 8));
    if constexpr (kErrors) std::memcpy(work.errors + index, owed, size_t(n) * sizeof(float));
}

template <int N, class Form, bool kErrors>
DS_INLINE void encode_as_body(const Work &work, int64_t begin, int64_t end) {
    const int64_t size = work.payloads->block, several = size < kAhead ? kAhead / size : 1;
    if (begin == end) return;
    Reader<Form, N, kErrors> reader(work, begin, end);
    Block block = block_of(work, begin);
    for (int64_t unit = begin; unit < end; ++unit, block = after(work, block)) {
        if ((unit - begin) % several == 0) reader.read(several);
        float scale;
        std::memcpy(&scale, scale_of(work, block), kScale);
        const ds::Divisor divisor = ds::divisor_of(scale > 0 ? scale : 1.0f);
        for (int64_t first = 0; first < block.numel; first += kStep) {
            const int64_t n = block.numel - first < kStep ? block.numel - first : kStep;
            encode_step<Form, N, kErrors>(work, block, first, n, scale, divisor, reader.key(end - unit));
        }
    }
}

DS_LANES_APART(encode_as, (class Form, bool kErrors), (Form, kErrors), (const Work &work, int64_t begin, int64_t end),
               (work, begin, end))

template <class Form, int N>
DS_INLINE void encode_with(const Work &work, int64_t begin, int64_t end) {
    if (work.errors == nullptr) return encode_as<N, Form, false>(work, begin, end);
    encode_as<N, Form, true>(work, begin, end);
}

template <int N>
DS_INLINE void encode_run_body(const Work &work, int64_t begin, int64_t end) {
    const bool random = work.payloads->rounding == DS_RANDOM;
    switch (work.payloads->codes) {
        case DS_SIGNS: return encode_with<ds::Signs, N>(work, begin, end);
        case DS_FLOATS8: return encode_with<ds::EightBitFloats, N>(work, begin, end);
        case DS_INTEGERS4:
            if (random) return encode_with<ds::RandomIntegers<4>, N>(work, begin, end);
            return encode_with<ds::Integers<4>, N>(work, begin, end);
        default:
            if (random) return encode_with<ds::RandomIntegers<8>, N>(work, begin, end);
            return encode_with<ds::Integers<8>, N>(work, begin, end);
    }
}

// ---- numbers --------------------------------------------------------------------------------------------------------

DS_INLINE void decode_part(const Work &work, const Block &block, int64_t i, int64_t n, float *values) {
    float scale;
    std::memcpy(&scale, scale_of(work, block), kScale);
    const uint8_t *codes = codes_of(work, block.row, block.begin + i);
    switch (work.payloads->codes) {
        case DS_SIGNS: return ds::Signs::decode(values, codes, scale, n);
        case DS_INTEGERS4: return ds::Integers<4>::decode(values, codes, scale, n);
        case DS_FLOATS8: return ds::EightBitFloats::decode(values, codes, scale, n);
        default: return ds::Integers<8>::decode(values, codes, scale, n);
    }
}

DS_INLINE void decode_run_body(const Work &work, int64_t begin, int64_t end) {
    using ds::kBlock;
    alignas(64) float total[kBlock], buffer[kBlock];
    for (int64_t unit = begin; unit < end; ++unit) {
        Block block = block_of(work, unit);
        for (int64_t i = 0; i < block.numel; i += kBlock) {
            const int64_t n = block.numel - i < kBlock ? block.numel - i : kBlock;
            void *target = ds::at(work.values, block.first + i, work.dtype);
            float *result = work.dtype == DS_FLOAT32 ? static_cast<float *>(target) : total;
            if (work.sum) {
                std::memset(result, 0, size_t(n) * sizeof(float));
                for (block.row = 0; block.row < work.payloads->rows; ++block.row) {
                    decode_part(work, block, i, n, buffer);
                    DS_IVDEP for (int64_t j = 0; j < n; ++j) result[j] += buffer[j];
                }
            } else {
                decode_part(work, block, i, n, result);
            }
            ds::narrow(target, work.dtype, result, n);
        }
    }
}

DS_LANES_KERNEL(encode_run, (const Work &work, int64_t begin, int64_t end), (work, begin, end))
DS_KERNEL(decode_run, (const Work &work, int64_t begin, int64_t end), (work, begin, end))

int64_t blocks_of(const ds_payloads &p) { return (p.numel + p.block - 1) / p.block; }

template <class Run>
void for_each_block(const Work &work, int64_t rows, int32_t threads, Run &&run) {
    ds::for_each_share(rows * work.blocks, rows * work.payloads->numel, threads, run);
}

}  // namespace

void ds_encode(const ds_payloads *payloads, const void *values, int32_t dtype, float *errors, int32_t threads) {
    const ds_payloads &p = *payloads;
    const Work work{payloads, const_cast<void *>(values), dtype, errors, blocks_of(p), false};
    for (int64_t row = 0; row < p.rows; ++row) {  // a row's end is padding
        const int64_t used = work.blocks * kScale + (p.numel * bits_of(p) + 7) / 8;
        std::memset(p.data + row * p.stride + used, 0, size_t(p.stride - used));
    }
    for_each_block(work, p.rows, threads, [&](int64_t begin, int64_t end) { encode_run(work, begin, end); });
}

void ds_decode(const ds_payloads *payloads, void *values, int32_t dtype, int32_t sum, int32_t threads) {
    const Work work{payloads, values, dtype, nullptr, blocks_of(*payloads), sum != 0};
    for_each_block(work, sum ? 1 : payloads->rows, threads,
                   [&](int64_t begin, int64_t end) { decode_run(work, begin, end); });
}
