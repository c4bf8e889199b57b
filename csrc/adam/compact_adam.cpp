// Adam and AdamW with moments in 8 bits and, where parameters are bfloat16, stochastic rounding: one pass over memory.
//
// T. Dettmers et al.: 8-bit Optimizers via Block-wise Quantization (2021): codes with one absolute maximum per block;
// P. Zamirai et al.: Revisiting BFloat16 Training (2020): weights in bfloat16 alone.
//
// [Note: codes] A number of a block, as a share x of the block's largest magnitude, is coded as the position of x + c on
// the scale of floating-point numbers with few bits of mantissa (c = 1/256): relative steps for large numbers, equal
// steps near zero, as in mu-law telephony. `deepspeed/ops/formats/blockwise.py` is the reference and says more. Of the second
// moment the square root is kept, which is what the update needs. A new value is rounded up or down at random, in
// proportion: an average that moves by less than a step per update would otherwise never move.
//
// [Note: shifts] All is scaled by 2^-7, so that the lowest bits of c's exponent are zero: a code is a float's bits with
// other bits above and below it, decoding is a shift and an "or", encoding a shift.
//
// [Note: dither] What rounds the moments and the parameter of an element are the next numbers of two sequences, in which
// neither the updates of one element nor the elements of one update repeat each other: multiples, in 32 bits, of a number of
// the update and of one of the element's index in its parameter (H. Weyl 1916). Such sequences fill the range more evenly
// than throws of dice, so that errors of rounding cancel sooner; and they do not depend on threads, on slices or on who
// else computes the same element.
//
// [Note: two passes] A block of 256 elements is read, updated and left in the first-level cache in one loop, which keeps
// everything else in registers; the second loop, with the scales that the first has found, writes its codes.
//
// [Note: one behind] Scales are known when the last element of a block is updated, tens of cycles before the processor has
// anything to code with them. So one loop updates a block and codes the one before.
//
// [Note: pairs] Where parameters and gradients are bfloat16, neighbours are taken from memory together, a pair in each
// lane: a vector gets the even elements and a vector the odd ones by a shift and a mask, without moving lanes.
#include <cmath>
#include <vector>

#include "lanes.h"

namespace {

constexpr int64_t kCodes = 256;  // elements with one scale; divides ds::kBlock
constexpr uint32_t kBase = 112u << 23;  // the bits of c
constexpr float kOffset = 0x1p-15f;     // c
constexpr float kTiny = 1e-30f;         // largest magnitude of a block that counts as zero
constexpr float kAbove = 1.0f + 0x1p-22f;  // more than errors of rounding: the largest magnitude has the last code

// A sequence of [Note: dither]: what an update and an element add. Odd.
struct Sequence {
    uint32_t update, element, high;  // `high`: of the upper half of an index
};
constexpr Sequence kOfCodes{0x6a09e667u, 0x9e3779b9u, 0x85ebca6bu}, kOfParams{0x9e3779b9u, 0xbb67ae85u, 0xc2b2ae35u};

// Unsigned (a root) and signed (sign and magnitude) codes: the largest number, how many bits of a float a step takes.
struct Root {
    static constexpr uint32_t top = 255, shift = 18;
    static constexpr bool has_sign = false;
    static constexpr float span = 251.0f * kOffset;  // of x + c, from the first to the last code
};
struct Signed {
    static constexpr uint32_t top = 127, shift = 19;
    static constexpr bool has_sign = true;
    static constexpr float span = 247.0f * kOffset;
};

struct CompactAdam {
    float grad_scale;
    float beta1, rest1;
    float beta2, rest2;
    float eps;
    float decay;
    float l2;
    float step_size;
    float inv_correction2;
    float keep1, keep2;  // what decoding multiplies a block's scale by: beta1 and the root of beta2, over a code's span
    uint32_t update;     // its number
    bool stochastic, has_l2;
};

// A block at work. `grad` and `param`: fp32, or bfloat16 of which memory itself is read and written.
struct Block {
    void *param;
    const void *grad;
    void *state1, *state2;  // codes, or fp32
    float scale1, scale2;
    float *exp_avg, *root;  // of codes: new values
    uint32_t dither_codes, dither_params;  // of the first element
};

// How a segment is stored. `narrow`: bfloat16, of parameters that are rounded at random.
struct Kinds {
    bool coded, narrow_param, narrow_grad;
};

using ds::Vector;

// ---- two vectors of elements ----------------------------------------------------------------------------------------
// Of pairs (see [Note: pairs]) the even and the odd ones of 2 N elements, else the first N and the last.

template <class Words>
DS_INLINE void in_order(Words &pairs, int bits) {
    if constexpr (std::endian::native == std::endian::big) {
        const uint32_t mask = (1u << bits) - 1u;
        pairs = ((pairs & mask) << bits) | ((pairs >> bits) & mask);
    }
}

template <int N, bool kPairs, bool kNarrow, class Floats>
DS_INLINE void load_values(Floats (&to)[2], const void *from, int64_t i) {
    using Words = typename Vector<N>::Words;
    if constexpr (kPairs) {
        Words pairs;
        std::memcpy(&pairs, static_cast<const uint16_t *>(from) + i, sizeof pairs);
        in_order(pairs, 16);
        to[0] = __builtin_bit_cast(Floats, pairs << 16);
        to[1] = __builtin_bit_cast(Floats, pairs & 0xffff0000u);
    } else if constexpr (kNarrow) {
        Words words[2];
        Vector<N>::widen(words[0], static_cast<const uint16_t *>(from) + i);
        Vector<N>::widen(words[1], static_cast<const uint16_t *>(from) + i + N);
        to[0] = __builtin_bit_cast(Floats, words[0] << 16);
        to[1] = __builtin_bit_cast(Floats, words[1] << 16);
    } else {
        std::memcpy(&to[0], static_cast<const float *>(from) + i, sizeof to[0]);
        std::memcpy(&to[1], static_cast<const float *>(from) + i + N, sizeof to[1]);
    }
}

// bfloat16 with 16 bits added below its last one. `kWide`: of what was computed from fp32, where a NaN may have bits there
// that carry over its sign; one of bfloat16 has none.
template <bool kWide, class Words, class Floats>
DS_INLINE void dithered(Words &bits, const Floats &value, const Words &dither) {
    bits = __builtin_bit_cast(Words, value) + (dither >> 16);
    if constexpr (kWide) bits = value != value ? Words{} + 0x7fc00000u : bits;
}

template <int N, bool kPairs, bool kNarrow, class Words, class Floats>
DS_INLINE void store_values(void *to, int64_t i, const Floats (&from)[2], const Words (&dither)[2]) {
    if constexpr (kNarrow) {
        Words bits[2];
        dithered<!kPairs>(bits[0], from[0], dither[0]);
        dithered<!kPairs>(bits[1], from[1], dither[1]);
        uint16_t *target = static_cast<uint16_t *>(to) + i;
        if constexpr (kPairs) {
            Words pairs = (bits[0] >> 16) | (bits[1] & 0xffff0000u);
            in_order(pairs, 16);
            std::memcpy(target, &pairs, sizeof pairs);
        } else {
            Vector<N>::narrow(target, bits[0] >> 16);
            Vector<N>::narrow(target + N, bits[1] >> 16);
        }
    } else {
        std::memcpy(static_cast<float *>(to) + i, &from[0], sizeof from[0]);
        std::memcpy(static_cast<float *>(to) + i + N, &from[1], sizeof from[1]);
    }
}

// Codes in the lowest 8 bits, of the second vector of pairs in the 8 bits above; other bits are anything.
template <int N, bool kPairs, class Words>
DS_INLINE void load_codes(Words (&to)[2], const void *from, int64_t i) {
    const uint8_t *codes = static_cast<const uint8_t *>(from) + i;
    if constexpr (kPairs) {
        Vector<N>::widen(to[0], reinterpret_cast<const uint16_t *>(codes));
        in_order(to[0], 8);
        to[1] = to[0];
    } else {
        Vector<N>::widen(to[0], codes);
        Vector<N>::widen(to[1], codes + N);
    }
}

// Codes in the lowest 8 bits of each.
template <int N, bool kPairs, class Words>
DS_INLINE void store_codes(void *to, int64_t i, const Words (&from)[2]) {
    uint8_t *codes = static_cast<uint8_t *>(to) + i;
    if constexpr (kPairs) {
        Words pairs = (from[0] & 0xffu) | (from[1] << 8);
        in_order(pairs, 8);
        Vector<N>::narrow(reinterpret_cast<uint16_t *>(codes), pairs);
    } else {
        Vector<N>::narrow(codes, from[0]);
        Vector<N>::narrow(codes + N, from[1]);
    }
}

// What the elements of two vectors have of a sequence, and what the next two add.
template <int N, bool kPairs, class Words>
DS_INLINE void begin_dither(Words (&dither)[2], uint32_t first, uint32_t element) {
    uint32_t lanes[N];
    for (uint32_t j = 0; j < N; ++j) lanes[j] = (kPairs ? 2 * j : j) * element;
    std::memcpy(&dither[0], lanes, sizeof dither[0]);
    dither[0] = dither[0] + first;
    dither[1] = dither[0] + (kPairs ? 1 : N) * element;
}
template <int N, class Words>
DS_INLINE void next_dither(Words (&dither)[2], uint32_t element) {
    dither[0] = dither[0] + 2 * N * element;
    dither[1] = dither[1] + 2 * N * element;
}

// ---- codes ----------------------------------------------------------------------------------------------------------

// Shares of the largest magnitude, times the code's span. `kAt`: the code's lowest bit.
template <class Code, int kAt, class Words, class Floats>
DS_INLINE void decode(Floats &share, const Words &codes) {
    const Words bits = ((codes << (Code::shift - kAt)) & (Code::top << Code::shift)) | kBase;
    share = __builtin_bit_cast(Floats, bits) - kOffset;
    if constexpr (Code::has_sign)
        share = __builtin_bit_cast(Floats, __builtin_bit_cast(Words, share) | ((codes << (24 - kAt)) & 0x80000000u));
}

// The position, its code in the lowest bits.
template <class Code, class Words, class Floats>
DS_INLINE void encode(Words &position, const Floats &magnitude, float factor, const Words &dither) {
    constexpr uint32_t most = kBase + (Code::top << Code::shift);
    const Floats shifted = magnitude * factor + kOffset;
    const Words bits = __builtin_bit_cast(Words, shifted), last = Words{} + most;
    position = ((last < bits ? last : bits) + (dither >> (32 - Code::shift))) >> Code::shift;
}

template <class Words>
DS_INLINE void take_larger(Words &largest, const Words &bits) { largest = largest > bits ? largest : bits; }

template <class Words>
DS_INLINE uint32_t largest_of(const Words &lanes) {
    uint32_t each[sizeof(Words) / 4], result = 0;
    std::memcpy(each, &lanes, sizeof each);
    for (const uint32_t bits : each) result = bits > result ? bits : result;
    return result;
}

DS_INLINE float scale_of(uint32_t largest) {
    const float found = std::bit_cast<float>(largest);
    return found < kTiny ? 0.0f : found;
}

template <class Code>
DS_INLINE float factor_of(float scale) { return scale == 0.0f ? 0.0f : (Code::span / scale) * kAbove; }

// ---- blocks ---------------------------------------------------------------------------------------------------------

// The first pass over a block: `take` averages 2 N elements.
template <int N, bool kCoded, bool kNarrowParam, bool kNarrowGrad, bool kDecoupled = false>
struct Averaging {
    using Floats = typename Vector<N>::Floats;
    using Words = typename Vector<N>::Words;
    static constexpr bool kPairs = kCoded && kNarrowParam && kNarrowGrad;
    float keep1, keep2;
    Words largest1, largest2;

    DS_INLINE_MEMBER void begin(const Block &b, const CompactAdam &c) {
        keep1 = b.scale1 * c.keep1;
        keep2 = b.scale2 * c.keep2;
        largest1 = largest2 = Words{};
    }

    DS_INLINE_MEMBER void take(const Block &b, const CompactAdam &c, int64_t i) {
        Floats grad[2], exp_avg[2], before[2];
        load_values<N, kPairs, kNarrowGrad>(grad, b.grad, i);
        grad[0] = grad[0] * c.grad_scale;
        grad[1] = grad[1] * c.grad_scale;
        if (!kDecoupled && c.has_l2) {
            Floats param[2];
            load_values<N, kPairs, kNarrowParam>(param, b.param, i);
            grad[0] = grad[0] + c.l2 * param[0];
            grad[1] = grad[1] + c.l2 * param[1];
        }
        if constexpr (kCoded) {
            Words codes[2];
            load_codes<N, kPairs>(codes, b.state1, i);
            decode<Signed, 0>(exp_avg[0], codes[0]);
            decode<Signed, kPairs ? 8 : 0>(exp_avg[1], codes[1]);
            load_codes<N, kPairs>(codes, b.state2, i);
            decode<Root, 0>(before[0], codes[0]);
            decode<Root, kPairs ? 8 : 0>(before[1], codes[1]);
        } else {
            load_values<N, false, false>(exp_avg, b.state1, i);
            load_values<N, false, false>(before, b.state2, i);
        }
#pragma GCC unroll 2
        for (int k = 0; k < 2; ++k) {
            if constexpr (kCoded) {
                before[k] = before[k] * keep2;
                before[k] = before[k] * before[k];
                exp_avg[k] = exp_avg[k] * keep1;
            } else {
                before[k] = c.beta2 * before[k];
                exp_avg[k] = c.beta1 * exp_avg[k];
            }
            exp_avg[k] = exp_avg[k] + c.rest1 * grad[k];
            const Floats exp_avg_sq = before[k] + (c.rest2 * grad[k]) * grad[k];
            Floats root = exp_avg_sq;
            Vector<N>::take_root(root);
            if constexpr (kCoded) {
                take_larger(largest1, __builtin_bit_cast(Words, exp_avg[k]) & 0x7fffffffu);
                take_larger(largest2, __builtin_bit_cast(Words, root));
            } else {
                std::memcpy(static_cast<float *>(b.state1) + i + k * N, &exp_avg[k], sizeof root);
                std::memcpy(static_cast<float *>(b.state2) + i + k * N, &exp_avg_sq, sizeof root);
            }
            std::memcpy(b.exp_avg + i + k * N, &exp_avg[k], sizeof root);
            std::memcpy(b.root + i + k * N, &root, sizeof root);
        }
    }

    // The scales of the `n` averages that are to be coded. A NaN loses its sign, which is another on every processor.
    DS_INLINE_MEMBER void end(Block &b, int64_t n) const {
        b.scale1 = scale_of(largest_of(largest1));
        b.scale2 = scale_of(largest_of(largest2) & 0x7fffffffu);
        if (b.scale1 == b.scale1) return;
        for (int64_t i = 0; i < n; ++i)
            if (b.exp_avg[i] != b.exp_avg[i]) b.exp_avg[i] = std::bit_cast<float>(0x7fc00000u);
    }
};

// The second pass: `take` moves 2 N parameters, and codes their averages.
template <int N, bool kCoded, bool kNarrowParam, bool kPairs>
struct Moving {
    using Floats = typename Vector<N>::Floats;
    using Words = typename Vector<N>::Words;
    float factor1, factor2;
    uint32_t least;
    Words of_params[2], of_codes[2];

    DS_INLINE_MEMBER void begin(const Block &b) {
        begin_dither<N, kPairs>(of_params, b.dither_params, kOfParams.element);
        if constexpr (kCoded) {
            factor1 = factor_of<Signed>(b.scale1);
            factor2 = factor_of<Root>(b.scale2);
            // Only zero is coded as zero: a parameter would leap if the root below its first moment were lost.
            least = b.scale2 == 0.0f ? 0u : (kBase >> Root::shift) + 1u;
            begin_dither<N, kPairs>(of_codes, b.dither_codes, kOfCodes.element);
        }
    }

    DS_INLINE_MEMBER void take(const Block &b, const CompactAdam &c, int64_t i) {
        Floats param[2];
        Words first[2], second[2];
        load_values<N, kPairs, kNarrowParam>(param, b.param, i);
#pragma GCC unroll 2
        for (int k = 0; k < 2; ++k) {
            Floats exp_avg, root;
            std::memcpy(&exp_avg, b.exp_avg + i + k * N, sizeof root);
            std::memcpy(&root, b.root + i + k * N, sizeof root);
            param[k] = param[k] * c.decay - (c.step_size * exp_avg) / (root * c.inv_correction2 + c.eps);
            if constexpr (kCoded) {
                Words bits = __builtin_bit_cast(Words, exp_avg);
                encode<Signed>(first[k], __builtin_bit_cast(Floats, bits & 0x7fffffffu), factor1, of_codes[k]);
                first[k] = (first[k] & 127u) | ((bits >> 24) & 128u);
                bits = __builtin_bit_cast(Words, root);
                encode<Root>(second[k], root, factor2, of_codes[k]);
                const Words lowest = Words{} + least;
                bits = bits < lowest ? bits : lowest;
                take_larger(second[k], bits);
            }
        }
        store_values<N, kPairs, kNarrowParam>(b.param, i, param, of_params);
        next_dither<N>(of_params, kOfParams.element);
        if constexpr (kCoded) {
            store_codes<N, kPairs>(b.state1, i, first);
            store_codes<N, kPairs>(b.state2, i, second);
            next_dither<N>(of_codes, kOfCodes.element);
        }
    }
};

// `dither`: of the first.
DS_INLINE void round_randomly(uint16_t *__restrict to, const float *__restrict values, uint32_t dither, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t sum = std::bit_cast<uint32_t>(values[i]) + ((dither + uint32_t(i) * kOfParams.element) >> 16);
        to[i] = values[i] != values[i] ? 0x7fc0u : uint16_t(sum >> 16);
    }
}

// `n`: a multiple of 2 N.
template <int N, bool kCoded, bool kNarrowParam, bool kNarrowGrad>
DS_INLINE void step_of(Block &b, const CompactAdam &c, int64_t n) {
    Averaging<N, kCoded, kNarrowParam, kNarrowGrad> averaging;
    averaging.begin(b, c);
    for (int64_t i = 0; i < n; i += 2 * N) averaging.take(b, c, i);
    if constexpr (kCoded) averaging.end(b, n);
    Moving<N, kCoded, kNarrowParam, decltype(averaging)::kPairs> moving;
    moving.begin(b);
    for (int64_t i = 0; i < n; i += 2 * N) moving.take(b, c, i);
}

template <int N, bool kNarrowParam, bool kNarrowGrad>
DS_INLINE void step_of(Block &b, bool coded, const CompactAdam &c, int64_t n) {
    if (coded) return step_of<N, true, kNarrowParam, kNarrowGrad>(b, c, n);
    step_of<N, false, kNarrowParam, kNarrowGrad>(b, c, n);
}

template <int N>
DS_INLINE void step_of(Block &b, const Kinds &k, const CompactAdam &c, int64_t n) {
    if (k.narrow_param && k.narrow_grad) return step_of<N, true, true>(b, k.coded, c, n);
    if (k.narrow_param) return step_of<N, true, false>(b, k.coded, c, n);
    if (k.narrow_grad) return step_of<N, false, true>(b, k.coded, c, n);
    return step_of<N, false, false>(b, k.coded, c, n);
}

// The same for any `n` below kCodes: operands are filled up with copies of their last element, which change no largest
// magnitude (zeros would: in a block whose scale is infinite they are not numbers).
template <int N>
DS_INLINE void padded_step_of(Block &b, const Kinds &k, const CompactAdam &c, int64_t n) {
    struct Operand {
        void *memory;
        int64_t size;  // bytes of an element
    };
    const int64_t state = k.coded ? 1 : 4, padded = (n + 2 * N - 1) / (2 * N) * (2 * N);
    const Operand operands[4] = {{b.param, k.narrow_param ? 2 : 4},
                                 {const_cast<void *>(b.grad), k.narrow_grad ? 2 : 4},
                                 {b.state1, state},
                                 {b.state2, state}};
    alignas(64) char copies[4][kCodes * sizeof(float)];
    for (int i = 0; i < 4; ++i) {
        const auto [memory, size] = operands[i];
        std::memcpy(copies[i], memory, size_t(n * size));
        for (int64_t j = n; j < padded; ++j) std::memcpy(copies[i] + j * size, copies[i] + (n - 1) * size, size_t(size));
    }
    b.param = copies[0];
    b.grad = copies[1];
    b.state1 = copies[2];
    b.state2 = copies[3];
    step_of<N>(b, k, c, padded);
    for (const int i : {0, 2, 3}) std::memcpy(operands[i].memory, copies[i], size_t(n * operands[i].size));
}

DS_INLINE uint32_t first_of(const Sequence &sequence, uint32_t update, uint64_t index) {
    return update * sequence.update + uint32_t(index) * sequence.element + uint32_t(index >> 32) * sequence.high;
}

// Where the states of a block are, and its dither.
DS_INLINE Block block_at(const ds_compact_segment &s, const CompactAdam &c, const Kinds &k, int64_t i) {
    const uint64_t index = uint64_t(s.start + i);
    Block b{};
    b.state1 = static_cast<char *>(s.state1) + i * (k.coded ? 1 : 4);
    b.state2 = static_cast<char *>(s.state2) + i * (k.coded ? 1 : 4);
    if (k.coded) {
        b.scale1 = s.scale1[i / kCodes];
        b.scale2 = s.scale2[i / kCodes];
    }
    b.dither_codes = first_of(kOfCodes, c.update, index);
    b.dither_params = first_of(kOfParams, c.update, index);
    return b;
}

DS_INLINE void keep_scales(const ds_compact_segment &s, const Block &b, int64_t i) {
    s.scale1[i / kCodes] = b.scale1;
    s.scale2[i / kCodes] = b.scale2;
}

// Whole blocks of pairs from `begin` on; see [Note: one behind]. Returns where they end.
template <int N>
DS_INLINE int64_t pairs_run(const ds_compact_segment &s, const Kinds &k, const CompactAdam &c, int64_t begin, int64_t end) {
    alignas(64) float exp_avg[2][kCodes], root[2][kCodes];
    Averaging<N, true, true, true, true> averaging;
    Moving<N, true, true, true> moving;
    Block before{};
    int64_t i = begin;
    for (; i + kCodes <= end; i += kCodes) {
        Block b = block_at(s, c, k, i);
        const int64_t which = (i / kCodes) % 2;
        b.param = static_cast<uint16_t *>(s.param) + i;
        b.grad = static_cast<const uint16_t *>(s.grad) + i;
        b.exp_avg = exp_avg[which];
        b.root = root[which];
        averaging.begin(b, c);
        if (i == begin) {
            for (int64_t j = 0; j < kCodes; j += 2 * N) averaging.take(b, c, j);
        } else {
            moving.begin(before);
            for (int64_t j = 0; j < kCodes; j += 2 * N) {
                averaging.take(b, c, j);
                moving.take(before, c, j);
            }
        }
        averaging.end(b, kCodes);
        keep_scales(s, b, i);
        before = b;
    }
    if (i > begin) {
        moving.begin(before);
        for (int64_t j = 0; j < kCodes; j += 2 * N) moving.take(before, c, j);
    }
    return i;
}

template <int N>
DS_INLINE void compact_run_body(const ds_compact_segment &s, const ds_storage &type, const CompactAdam &constants,
                                int64_t begin, int64_t end) {
    const CompactAdam c = constants;
    const bool stochastic = c.stochastic && type.param == DS_BFLOAT16;
    const Kinds kinds{type.state == DS_CODES8, stochastic && s.low_precision == nullptr, type.grad == DS_BFLOAT16};
    alignas(64) float param_buffer[kCodes], grad_buffer[kCodes], exp_avg[kCodes], root[kCodes];
    if (kinds.coded && kinds.narrow_param && kinds.narrow_grad && !c.has_l2)
        begin = pairs_run<N>(s, kinds, c, begin, end);
    for (int64_t i = begin; i < end; i += kCodes) {
        const int64_t n = end - i < kCodes ? end - i : kCodes;
        Block b = block_at(s, c, kinds, i);
        b.exp_avg = exp_avg;
        b.root = root;
        b.grad = ds::at(s.grad, i, type.grad);
        if (!kinds.narrow_grad) b.grad = ds::widen(b.grad, type.grad, grad_buffer, n);
        ds::Operand param{ds::at(s.param, i, type.param), type.param, param_buffer};
        if (!kinds.narrow_param) param = ds::open(s.param, i, type.param, param_buffer, n);
        b.param = kinds.narrow_param ? param.memory : param.values;
        if (n % (2 * N) == 0)
            step_of<N>(b, kinds, c, n);
        else
            padded_step_of<N>(b, kinds, c, n);
        if (kinds.coded) keep_scales(s, b, i);
        if (kinds.narrow_param) continue;
        if (stochastic)
            round_randomly(static_cast<uint16_t *>(param.memory), param.values, b.dither_params, n);
        else
            ds::close(param, n);
        if (s.low_precision != nullptr)
            ds::narrow(ds::at(s.low_precision, i, type.low_precision), type.low_precision, param.values, n);
    }
}

DS_LANES_KERNEL(compact_run,
                (const ds_compact_segment &s, const ds_storage &type, const CompactAdam &constants, int64_t begin,
                 int64_t end),
                (s, type, constants, begin, end))

}  // namespace

void ds_compact_adam(const ds_compact_segment *segments, int64_t count, const ds_storage *storage, double lr,
                     double beta1, double beta2, double eps, double weight_decay, double grad_scale,
                     int32_t bias_correction, int32_t decoupled, int32_t stochastic, int32_t threads) {
    CompactAdam c{};
    c.grad_scale = float(grad_scale);
    c.beta1 = float(beta1);
    c.rest1 = float(1.0 - beta1);
    c.beta2 = float(beta2);
    c.rest2 = float(1.0 - beta2);
    c.eps = float(eps);
    c.decay = decoupled != 0 ? float(1.0 - lr * weight_decay) : 1.0f;
    c.l2 = decoupled != 0 ? 0.0f : float(weight_decay);
    c.keep1 = float(beta1 / double(Signed::span));
    c.keep2 = float(std::sqrt(beta2) / double(Root::span));
    c.has_l2 = c.l2 != 0.0f;
    c.stochastic = stochastic != 0;

    static thread_local std::vector<CompactAdam> constants;
    constants.resize(size_t(count));
    for (int64_t i = 0; i < count; ++i) {
        const float step = *segments[i].step += 1.0f;
        c.step_size = float(bias_correction ? lr / (1.0 - std::pow(beta1, double(step))) : lr);
        c.inv_correction2 = bias_correction ? float(1.0 / std::sqrt(1.0 - std::pow(beta2, double(step)))) : 1.0f;
        c.update = uint32_t(step);
        constants[size_t(i)] = c;
    }
    const CompactAdam *all = constants.data();
    ds::for_each_run(
        count, threads, [&](int64_t i) { return segments[i].numel; },
        [&](int64_t i, int64_t begin, int64_t end) { compact_run(segments[i], *storage, all[i], begin, end); });
}
