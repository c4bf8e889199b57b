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
// [Note: random bits] are a hash of the update's number, of the element's index in its parameter and of its gradient, so
// they do not depend on threads, on slices or on who else computes the same element.
#include <cmath>
#include <vector>

#include "kernel.h"

namespace {

constexpr int64_t kCodes = 256;  // elements with one scale; divides ds::kBlock
constexpr uint32_t kOffsetBits = 119u << 23;
constexpr float kOffset = 0x1p-8f;
constexpr float kTiny = 1e-30f;  // largest magnitude of a block that counts as zero

// Unsigned (a root) and signed (sign and magnitude) codes: the largest number, how many bits of a float a step takes.
struct Root {
    static constexpr uint32_t top = 255, shift = 18;
    static constexpr float span = 251.0f / 256.0f;  // of x + c, from the first to the last code
};
struct Signed {
    static constexpr uint32_t top = 127, shift = 19;
    static constexpr float span = 247.0f / 256.0f;
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

template <class Code>
DS_INLINE float decode(uint32_t magnitude, float scale) {
    const float shifted = std::bit_cast<float>(kOffsetBits + (magnitude << Code::shift));
    return ((shifted - kOffset) * (1.0f / Code::span)) * scale;
}

// `share`: of the largest magnitude, times the span; `random`: less than one step.
template <class Code>
DS_INLINE uint32_t encode(float share, uint32_t random) {
    const uint32_t code = (std::bit_cast<uint32_t>(share + kOffset) - kOffsetBits + random) >> Code::shift;
    return code < Code::top ? code : Code::top;
}

DS_INLINE uint32_t magnitude_bits(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffffu; }

DS_INLINE uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x85ebca6bu;
    x = (x ^ (x >> 13)) * 0xc2b2ae35u;
    return x ^ (x >> 16);
}

DS_INLINE uint32_t third(uint32_t random) { return random * 0x9e3779b1u; }  // more bits from the same hash

// `second`: of codes the root of the second moment, else itself.
template <bool kCoded, bool kL2>
DS_INLINE void update(float *__restrict param, const float *__restrict grad, float *__restrict exp_avg,
                      float *__restrict second, uint32_t *__restrict random, const CompactAdam &c, uint32_t first,
                      int64_t n) {
    DS_IVDEP for (int64_t i = 0; i < n; ++i) {
        float g = grad[i] * c.grad_scale;
        random[i] = mix((first + uint32_t(i)) ^ std::bit_cast<uint32_t>(g));
        if constexpr (kL2) g = g + c.l2 * param[i];
        const float m = c.beta1 * exp_avg[i] + c.rest1 * g;
        const float before = kCoded ? second[i] * second[i] : second[i];
        const float v = c.beta2 * before + (c.rest2 * g) * g;
        const float r = std::sqrt(v);
        const float denominator = r * c.inv_correction2 + c.eps;
        exp_avg[i] = m;
        second[i] = kCoded ? r : v;
        param[i] = param[i] * c.decay - (c.step_size * m) / denominator;
    }
}

template <bool kCoded>
DS_INLINE void update_any(float *param, const float *grad, float *exp_avg, float *second, uint32_t *random,
                          const CompactAdam &c, uint32_t first, int64_t n) {
    if (c.l2 == 0.0f)
        update<kCoded, false>(param, grad, exp_avg, second, random, c, first, n);
    else
        update<kCoded, true>(param, grad, exp_avg, second, random, c, first, n);
}

DS_INLINE uint32_t largest(const float *values, int64_t n) {
    uint32_t bits = 0;  // magnitudes are ordered like their bits; NaN is above all
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t other = magnitude_bits(values[i]);
        bits = other > bits ? other : bits;
    }
    return bits;
}

DS_INLINE float scale_of(const float *values, int64_t n) {
    const float found = std::bit_cast<float>(largest(values, n));
    return found < kTiny ? 0.0f : found;
}

template <class Code>
DS_INLINE float inverse(float scale) { return scale == 0.0f ? 0.0f : Code::span / scale; }

DS_INLINE void decode_signed(float *__restrict values, const uint8_t *__restrict codes, float scale, int64_t n) {
    DS_IVDEP for (int64_t i = 0; i < n; ++i) {
        const uint32_t code = codes[i];
        const float magnitude = decode<Signed>(code & 127u, scale);
        values[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | ((code & 128u) << 24));
    }
}

DS_INLINE void decode_root(float *__restrict values, const uint8_t *__restrict codes, float scale, int64_t n) {
    DS_IVDEP for (int64_t i = 0; i < n; ++i) values[i] = decode<Root>(codes[i], scale);
}

DS_INLINE void encode_signed(uint8_t *__restrict codes, const float *__restrict values,
                             const uint32_t *__restrict random, float scale, int64_t n) {
    const float factor = inverse<Signed>(scale);
    DS_IVDEP for (int64_t i = 0; i < n; ++i) {
        const float magnitude = std::bit_cast<float>(magnitude_bits(values[i]));
        const float share = magnitude >= scale ? Signed::span : magnitude * factor;
        const uint32_t code = encode<Signed>(scale == 0.0f ? 0.0f : share, third(random[i]) >> (32 - Signed::shift));
        const uint32_t sign = (std::bit_cast<uint32_t>(values[i]) >> 24) & 128u;
        codes[i] = uint8_t(code == 0 ? 0u : code | sign);
    }
}

// Only zero is coded as zero: a parameter would leap if the root below its first moment were lost.
DS_INLINE void encode_root(uint8_t *__restrict codes, const float *__restrict values,
                           const uint32_t *__restrict random, float scale, int64_t n) {
    const float factor = inverse<Root>(scale);
    DS_IVDEP for (int64_t i = 0; i < n; ++i) {
        const float share = values[i] >= scale ? Root::span : values[i] * factor;
        const uint32_t code = encode<Root>(scale == 0.0f ? 0.0f : share, random[i] >> (32 - Root::shift));
        const uint32_t least = values[i] > 0.0f && scale > 0.0f ? 1u : 0u;
        codes[i] = uint8_t(code > least ? code : least);
    }
}

DS_INLINE void round_randomly(uint16_t *__restrict to, const float *__restrict values,
                              const uint32_t *__restrict random, int64_t n) {
    DS_IVDEP for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = std::bit_cast<uint32_t>(values[i]);
        const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
        to[i] = uint16_t(is_nan ? 0x7fc0u : (bits + (random[i] & 0xffffu)) >> 16);
    }
}

DS_INLINE void compact_run_body(const ds_compact_segment &s, const ds_storage &type, const CompactAdam &constants,
                                int64_t begin, int64_t end) {
    const CompactAdam c = constants;
    const bool random_params = c.stochastic && type.param == DS_BFLOAT16;
    alignas(64) float param_buffer[kCodes], grad_buffer[kCodes], first[kCodes], second[kCodes];
    alignas(64) uint32_t random[kCodes];
    for (int64_t i = begin; i < end; i += kCodes) {
        const int64_t n = end - i < kCodes ? end - i : kCodes;
        const ds::Operand param = ds::open(s.param, i, type.param, param_buffer, n);
        const float *grad = ds::widen(ds::at(s.grad, i, type.grad), type.grad, grad_buffer, n);
        const uint64_t index = uint64_t(s.start + i);
        const uint32_t start = c.key + uint32_t(index) + uint32_t(index >> 32) * 0x85ebca6bu;
        if (type.state == DS_CODES8) {
            uint8_t *codes1 = static_cast<uint8_t *>(s.state1) + i, *codes2 = static_cast<uint8_t *>(s.state2) + i;
            float *scale1 = s.scale1 + i / kCodes, *scale2 = s.scale2 + i / kCodes;
            decode_signed(first, codes1, *scale1, n);
            decode_root(second, codes2, *scale2, n);
            update_any<true>(param.values, grad, first, second, random, c, start, n);
            *scale1 = scale_of(first, n);
            *scale2 = scale_of(second, n);
            encode_signed(codes1, first, random, *scale1, n);
            encode_root(codes2, second, random, *scale2, n);
        } else {
            float *exp_avg = static_cast<float *>(s.state1) + i, *exp_avg_sq = static_cast<float *>(s.state2) + i;
            update_any<false>(param.values, grad, exp_avg, exp_avg_sq, random, c, start, n);
        }
        if (random_params)
            round_randomly(static_cast<uint16_t *>(param.memory), param.values, random, n);
        else
            ds::close(param, n);
        if (s.low_precision != nullptr)
            ds::narrow(ds::at(s.low_precision, i, type.low_precision), type.low_precision, param.values, n);
    }
}

DS_KERNEL(compact_run,
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
        c.key = uint32_t(step) * 0x9e3779b9u;
        constants[size_t(i)] = c;
    }
    const CompactAdam *all = constants.data();
    ds::for_each_run(
        count, threads, [&](int64_t i) { return segments[i].numel; },
        [&](int64_t i, int64_t begin, int64_t end) { compact_run(segments[i], *storage, all[i], begin, end); });
}
