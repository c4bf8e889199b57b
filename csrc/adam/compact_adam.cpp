// Adam and AdamW with moments in 8 bits and, where parameters are bfloat16, stochastic rounding: one pass over memory.
//
// T. Dettmers et al.: 8-bit Optimizers via Block-wise Quantization (2021): codes with one absolute maximum per block;
// P. Zamirai et al.: Revisiting BFloat16 Training (2020): weights in bfloat16 alone.
//
// [Note: codes] A number of a block, as a share x of the block's largest magnitude, is coded as the position of x + c on
// the scale of floating-point numbers with few bits of mantissa (c = 1/256): relative steps for large numbers, equal
// steps near zero, as in mu-law telephony. `deepspeed/ops/state_codes.py` is the reference and says more. Of the second
// moment the square root is kept, which is what the update needs. A new value is rounded up or down at random, in
// proportion: an average that moves by less than a step per update would otherwise never move.
//
// [Note: shifts] All is scaled by 2^-7, so that the lowest bits of c's exponent are zero: a code is a float's bits with
// other bits above and below it, decoding is a shift and an "or", encoding a shift.
//
// [Note: random bits] are a hash of the update's number, of the element's index in its parameter and of its gradient, so
// they do not depend on threads, on slices or on who else computes the same element.
//
// [Note: two passes] A block of 256 elements is read, updated and left in the first-level cache in one loop, which keeps
// everything else in registers; the second loop, with the scales that the first has found, writes its codes.
#include <cmath>
#include <vector>

#include "lanes.h"

namespace {

constexpr int64_t kCodes = 256;  // elements with one scale; divides ds::kBlock
constexpr uint32_t kBase = 112u << 23;  // the bits of c
constexpr float kOffset = 0x1p-15f;     // c
constexpr float kTiny = 1e-30f;         // largest magnitude of a block that counts as zero
constexpr float kAbove = 1.0f + 0x1p-22f;  // more than errors of rounding: the largest magnitude has the last code
constexpr uint32_t kStep = 0xc2b2ae3du, kIndex = 0x9e3779b1u, kIndexHigh = 0x85ebca6bu;  // odd, of any pattern

// Unsigned (a root) and signed (sign and magnitude) codes: the largest number, how many bits of a float a step takes.
struct Root {
    static constexpr uint32_t top = 255, shift = 18;
    static constexpr float span = 251.0f * kOffset;  // of x + c, from the first to the last code
};
struct Signed {
    static constexpr uint32_t top = 127, shift = 19;
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
    uint32_t key;  // of the random bits of this update
    bool stochastic;
};

// A block at work. `grad` and `param`: fp32, or bfloat16 of which memory itself is read and written.
struct Block {
    void *param;
    const void *grad;
    void *state1, *state2;  // codes, or fp32
    float scale1, scale2;
    float *exp_avg, *root;  // of codes: new values
    uint32_t *random;
    uint32_t first;               // of the hash, of the first element
    uint32_t largest1, largest2;  // bits of magnitudes, which are ordered like these; NaN is above all
};

// How a segment is stored. `narrow`: bfloat16, of parameters that are rounded at random.
struct Kinds {
    bool coded, narrow_param, narrow_grad;
};

using ds::Vector;

template <class Words, class Floats>
DS_INLINE void mix(Words &x, const Floats &grad) {
    x = (x ^ __builtin_bit_cast(Words, grad)) * 0x85ebca6bu;
    x = (x ^ (x >> 15)) * 0xc2b2ae35u;
    x = x ^ (x >> 16);
}

template <class Code, class Words, class Floats>
DS_INLINE void decode(Floats &value, const Words &codes, float scale) {
    const Words bits = ((codes << Code::shift) & (Code::top << Code::shift)) | kBase;
    value = ((__builtin_bit_cast(Floats, bits) - kOffset) * (1.0f / Code::span)) * scale;
}

// The position, its code in the lowest bits. `random`: less than one step.
template <class Code, class Words, class Floats>
DS_INLINE void encode(Words &position, const Floats &magnitude, float factor, const Words &random) {
    constexpr uint32_t most = kBase + (Code::top << Code::shift);
    const Floats shifted = magnitude * factor + kOffset;
    const Words bits = __builtin_bit_cast(Words, shifted), last = Words{} + most;
    position = ((last < bits ? last : bits) + random) >> Code::shift;
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

template <int N, bool kNarrow, class Floats>
DS_INLINE void load_values(Floats &to, const void *from, int64_t i) {
    if constexpr (kNarrow) {
        typename Vector<N>::Words words;
        Vector<N>::widen(words, static_cast<const uint16_t *>(from) + i);
        to = __builtin_bit_cast(Floats, words << 16);
    } else {
        std::memcpy(&to, static_cast<const float *>(from) + i, sizeof to);
    }
}

template <int N, bool kNarrow, class Words, class Floats>
DS_INLINE void store_values(void *to, int64_t i, const Floats &from, const Words &random) {
    if constexpr (kNarrow) {
        const Words rounded = (__builtin_bit_cast(Words, from) + (random & 0xffffu)) >> 16;
        const Words written = from != from ? Words{} + 0x7fc0u : rounded;
        Vector<N>::narrow(static_cast<uint16_t *>(to) + i, written);
    } else {
        std::memcpy(static_cast<float *>(to) + i, &from, sizeof from);
    }
}

// `n`: a multiple of N.
template <int N, bool kCoded, bool kNarrowParam, bool kNarrowGrad>
DS_INLINE void update(Block &b, const CompactAdam &c, int64_t n) {
    using Floats = typename Vector<N>::Floats;
    using Words = typename Vector<N>::Words;
    Words index, largest1 = Words{}, largest2 = Words{};
    uint32_t lane[N];
    for (int64_t j = 0; j < N; ++j) lane[j] = uint32_t(j) * kIndex;
    std::memcpy(&index, lane, sizeof index);
    index = index + b.first;
    for (int64_t i = 0; i < n; i += N) {
        Floats param, g, exp_avg, before;
        load_values<N, kNarrowParam>(param, b.param, i);
        load_values<N, kNarrowGrad>(g, b.grad, i);
        g = g * c.grad_scale;
        Words random = index;
        mix(random, g);
        index = index + uint32_t(N) * kIndex;
        if (c.l2 != 0.0f) g = g + c.l2 * param;
        if constexpr (kCoded) {
            Words codes;
            Vector<N>::widen(codes, static_cast<const uint8_t *>(b.state1) + i);
            decode<Signed>(exp_avg, codes, b.scale1);
            exp_avg = __builtin_bit_cast(Floats, __builtin_bit_cast(Words, exp_avg) | ((codes << 24) & 0x80000000u));
            Vector<N>::widen(codes, static_cast<const uint8_t *>(b.state2) + i);
            decode<Root>(before, codes, b.scale2);
            before = before * before;
        } else {
            std::memcpy(&exp_avg, static_cast<const float *>(b.state1) + i, sizeof exp_avg);
            std::memcpy(&before, static_cast<const float *>(b.state2) + i, sizeof before);
        }
        exp_avg = c.beta1 * exp_avg + c.rest1 * g;
        const Floats exp_avg_sq = c.beta2 * before + (c.rest2 * g) * g;
        Floats root = exp_avg_sq;
        Vector<N>::take_root(root);
        param = param * c.decay - (c.step_size * exp_avg) / (root * c.inv_correction2 + c.eps);
        store_values<N, kNarrowParam>(b.param, i, param, random);
        std::memcpy(b.random + i, &random, sizeof random);
        if constexpr (kCoded) {
            take_larger(largest1, __builtin_bit_cast(Words, exp_avg) & 0x7fffffffu);
            take_larger(largest2, __builtin_bit_cast(Words, root) & 0x7fffffffu);
            std::memcpy(b.exp_avg + i, &exp_avg, sizeof exp_avg);
            std::memcpy(b.root + i, &root, sizeof root);
        } else {
            std::memcpy(static_cast<float *>(b.state1) + i, &exp_avg, sizeof exp_avg);
            std::memcpy(static_cast<float *>(b.state2) + i, &exp_avg_sq, sizeof exp_avg_sq);
        }
    }
    b.largest1 = largest_of(largest1);
    b.largest2 = largest_of(largest2);
}

template <class Code>
DS_INLINE float factor_of(float scale) { return scale == 0.0f ? 0.0f : (Code::span / scale) * kAbove; }

template <int N>
DS_INLINE void write_codes(const Block &b, int64_t n) {
    using Floats = typename Vector<N>::Floats;
    using Words = typename Vector<N>::Words;
    const float factor1 = factor_of<Signed>(b.scale1), factor2 = factor_of<Root>(b.scale2);
    // Only zero is coded as zero: a parameter would leap if the root below its first moment were lost.
    const Words least = Words{} + (b.scale2 == 0.0f ? 0u : (kBase >> Root::shift) + 1u);
    for (int64_t i = 0; i < n; i += N) {
        Words random, position;
        Floats value;
        std::memcpy(&random, b.random + i, sizeof random);
        std::memcpy(&value, b.exp_avg + i, sizeof value);
        Words bits = __builtin_bit_cast(Words, value);
        encode<Signed>(position, __builtin_bit_cast(Floats, bits & 0x7fffffffu), factor1,
                       random & ((1u << Signed::shift) - 1u));
        position = position | ((bits >> 24) & 128u);
        Vector<N>::narrow(static_cast<uint8_t *>(b.state1) + i, position);
        std::memcpy(&value, b.root + i, sizeof value);
        bits = __builtin_bit_cast(Words, value);
        encode<Root>(position, value, factor2, random >> (32 - Root::shift));
        bits = bits < least ? bits : least;
        take_larger(position, bits);
        Vector<N>::narrow(static_cast<uint8_t *>(b.state2) + i, position);
    }
}

DS_INLINE float scale_of(uint32_t largest) {
    const float found = std::bit_cast<float>(largest);
    return found < kTiny ? 0.0f : found;
}

DS_INLINE void round_randomly(uint16_t *__restrict to, const float *__restrict values,
                              const uint32_t *__restrict random, int64_t n) {
    for (int64_t i = 0; i < n; ++i) store_values<1, true>(to, i, values[i], random[i]);
}

template <int N, bool kNarrowParam, bool kNarrowGrad>
DS_INLINE void step_of(Block &b, bool coded, const CompactAdam &c, int64_t n) {
    if (!coded) return update<N, false, kNarrowParam, kNarrowGrad>(b, c, n);
    update<N, true, kNarrowParam, kNarrowGrad>(b, c, n);
    b.scale1 = scale_of(b.largest1);
    b.scale2 = scale_of(b.largest2);
    write_codes<N>(b, n);
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
    const int64_t state = k.coded ? 1 : 4, padded = (n + N - 1) / N * N;
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

template <int N>
DS_INLINE void compact_run_body(const ds_compact_segment &s, const ds_storage &type, const CompactAdam &constants,
                                int64_t begin, int64_t end) {
    const CompactAdam c = constants;
    const bool stochastic = c.stochastic && type.param == DS_BFLOAT16;
    const Kinds kinds{type.state == DS_CODES8, stochastic && s.low_precision == nullptr, type.grad == DS_BFLOAT16};
    alignas(64) float param_buffer[kCodes], grad_buffer[kCodes], exp_avg[kCodes], root[kCodes];
    alignas(64) uint32_t random[kCodes];
    const int64_t state_size = kinds.coded ? 1 : 4;
    for (int64_t i = begin; i < end; i += kCodes) {
        const int64_t n = end - i < kCodes ? end - i : kCodes;
        const uint64_t index = uint64_t(s.start + i);
        Block b{};
        b.exp_avg = exp_avg;
        b.root = root;
        b.random = random;
        b.first = c.key + uint32_t(index) * kIndex + uint32_t(index >> 32) * kIndexHigh;
        b.state1 = static_cast<char *>(s.state1) + i * state_size;
        b.state2 = static_cast<char *>(s.state2) + i * state_size;
        if (kinds.coded) {
            b.scale1 = s.scale1[i / kCodes];
            b.scale2 = s.scale2[i / kCodes];
        }
        b.grad = ds::at(s.grad, i, type.grad);
        if (!kinds.narrow_grad) b.grad = ds::widen(b.grad, type.grad, grad_buffer, n);
        ds::Operand param{ds::at(s.param, i, type.param), type.param, param_buffer};
        if (!kinds.narrow_param) param = ds::open(s.param, i, type.param, param_buffer, n);
        b.param = kinds.narrow_param ? param.memory : param.values;
        if (n % N == 0)
            step_of<N>(b, kinds, c, n);
        else
            padded_step_of<N>(b, kinds, c, n);
        if (kinds.coded) {
            s.scale1[i / kCodes] = b.scale1;
            s.scale2[i / kCodes] = b.scale2;
        }
        if (kinds.narrow_param) continue;
        if (stochastic)
            round_randomly(static_cast<uint16_t *>(param.memory), param.values, random, n);
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
    c.stochastic = stochastic != 0;

    static thread_local std::vector<CompactAdam> constants;
    constants.resize(size_t(count));
    for (int64_t i = 0; i < count; ++i) {
        const float step = *segments[i].step += 1.0f;
        c.step_size = float(bias_correction ? lr / (1.0 - std::pow(beta1, double(step))) : lr);
        c.inv_correction2 = bias_correction ? float(1.0 / std::sqrt(1.0 - std::pow(beta2, double(step)))) : 1.0f;
        c.key = uint32_t(step) * kStep;
        constants[size_t(i)] = c;
    }
    const CompactAdam *all = constants.data();
    ds::for_each_run(
        count, threads, [&](int64_t i) { return segments[i].numel; },
        [&](int64_t i, int64_t begin, int64_t end) { compact_run(segments[i], *storage, all[i], begin, end); });
}
