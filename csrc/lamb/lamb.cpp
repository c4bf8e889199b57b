// LAMB: Y. You et al., Large Batch Optimization for Deep Learning (ICLR 2020).
//
// Two passes, because the trust ratio needs norms of whole tensors, of which a segment may be a part. The update is not
// kept between them: the second pass forms it again, bit for bit, from the new moments and the parameter.
#include <cmath>
#include <vector>

#include "sums.h"

namespace {

struct Lamb {
    float grad_scale;
    float beta1, rest1;
    float beta2, rest2;
    float eps;
    float weight_decay;
    float inv_correction1;       // 1 / bias_correction1
    float inv_correction2;       // 1 / bias_correction2: of the second moment itself
    float inv_sqrt_correction2;  // 1 / sqrt(bias_correction2)
    bool eps_inside_sqrt;
};

DS_INLINE void lamb_moments_block(const float *__restrict grad, float *__restrict exp_avg, float *__restrict exp_avg_sq,
                                  const Lamb &c, int64_t n) {
    DS_IVDEP for (int64_t i = 0; i < n; ++i) {
        const float g = grad[i] * c.grad_scale;
        exp_avg[i] = c.beta1 * exp_avg[i] + c.rest1 * g;
        exp_avg_sq[i] = c.beta2 * exp_avg_sq[i] + (c.rest2 * g) * g;
    }
}

DS_INLINE void lamb_update_block(const float *__restrict param, const float *__restrict exp_avg,
                                 const float *__restrict exp_avg_sq, float *__restrict update, const Lamb &c,
                                 int64_t n) {
    if (c.eps_inside_sqrt) {
        DS_IVDEP for (int64_t i = 0; i < n; ++i) {
            const float denominator = std::sqrt(exp_avg_sq[i] * c.inv_correction2 + c.eps);
            update[i] = (exp_avg[i] * c.inv_correction1) / denominator + c.weight_decay * param[i];
        }
    } else {
        DS_IVDEP for (int64_t i = 0; i < n; ++i) {
            const float denominator = std::sqrt(exp_avg_sq[i]) * c.inv_sqrt_correction2 + c.eps;
            update[i] = (exp_avg[i] * c.inv_correction1) / denominator + c.weight_decay * param[i];
        }
    }
}

// sums: two doubles per block of the segment.
DS_INLINE void lamb_first_body(const ds_segment &s, const ds_storage &type, const Lamb &constants, double *sums,
                               int64_t begin, int64_t end) {
    const Lamb c = constants;
    alignas(64) float buffer[5][ds::kBlock];
    for (int64_t i = begin; i < end; i += ds::kBlock) {
        const int64_t n = end - i < ds::kBlock ? end - i : ds::kBlock;
        const float *param = ds::widen(ds::at<const void>(s.param, i, type.param), type.param, buffer[0], n);
        const float *grad = ds::widen(ds::at(s.grad, i, type.grad), type.grad, buffer[1], n);
        const ds::Operand exp_avg = ds::open(s.state1, i, type.state, buffer[3], n);
        const ds::Operand exp_avg_sq = ds::open(s.state2, i, type.state, buffer[4], n);
        lamb_moments_block(grad, exp_avg.values, exp_avg_sq.values, c, n);
        ds::close(exp_avg, n);
        ds::close(exp_avg_sq, n);
        // The update comes from the moments as they are stored: the second pass sees nothing else.
        const float *stored = ds::widen(exp_avg.memory, type.state, buffer[3], n);
        const float *stored_sq = ds::widen(exp_avg_sq.memory, type.state, buffer[4], n);
        lamb_update_block(param, stored, stored_sq, buffer[2], c, n);
        sums[2 * (i / ds::kBlock)] = ds::block_sum_of_squares(param, n);
        sums[2 * (i / ds::kBlock) + 1] = ds::block_sum_of_squares(buffer[2], n);
    }
}

DS_INLINE void lamb_second_body(const ds_segment &s, const ds_storage &type, const Lamb &constants, float rate,
                                int64_t begin, int64_t end, bool stream) {
    const Lamb c = constants;
    alignas(64) float buffer[4][ds::kBlock];
    const int64_t step = ds::block_numel(s);
    for (int64_t i = begin; i < end; i += step) {
        const int64_t n = end - i < step ? end - i : step;
        const ds::Operand param = ds::open(s.param, i, type.param, buffer[0], n);
        const float *exp_avg = ds::widen(ds::at(s.state1, i, type.state), type.state, buffer[2], n);
        const float *exp_avg_sq = ds::widen(ds::at(s.state2, i, type.state), type.state, buffer[3], n);
        lamb_update_block(param.values, exp_avg, exp_avg_sq, buffer[1], c, n);
        float *__restrict p = param.values;
        DS_IVDEP for (int64_t j = 0; j < n; ++j) p[j] = p[j] - rate * buffer[1][j];
        ds::close(param, n);
        ds::copy_out(s, type, i, param.values, n, stream);
    }
    ds::end_copies(stream);
}

DS_KERNEL(lamb_first,
          (const ds_segment &s, const ds_storage &type, const Lamb &constants, double *sums, int64_t begin,
           int64_t end),
          (s, type, constants, sums, begin, end))
DS_KERNEL(lamb_second,
          (const ds_segment &s, const ds_storage &type, const Lamb &constants, float rate, int64_t begin, int64_t end,
           bool stream),
          (s, type, constants, rate, begin, end, stream))

Lamb common(double beta1, double beta2, double eps, double weight_decay, int32_t eps_inside_sqrt) {
    Lamb c{};
    c.beta1 = float(beta1);
    c.rest1 = float(1.0 - beta1);
    c.beta2 = float(beta2);
    c.rest2 = float(1.0 - beta2);
    c.eps = float(eps);
    c.weight_decay = float(weight_decay);
    c.eps_inside_sqrt = eps_inside_sqrt != 0;
    return c;
}

void correct(Lamb &c, double beta1, double beta2, double step, int32_t bias_correction) {
    const double correction1 = bias_correction ? 1.0 - std::pow(beta1, step) : 1.0;
    const double correction2 = bias_correction ? 1.0 - std::pow(beta2, step) : 1.0;
    c.inv_correction1 = float(1.0 / correction1);
    c.inv_correction2 = float(1.0 / correction2);
    c.inv_sqrt_correction2 = float(1.0 / std::sqrt(correction2));
}

std::vector<Lamb> &per_segment(const ds_segment *segments, int64_t count, Lamb c, double beta1, double beta2,
                               int32_t bias_correction) {
    static thread_local std::vector<Lamb> constants;
    constants.clear();
    for (int64_t i = 0; i < count; ++i) {
        correct(c, beta1, beta2, double(*segments[i].step), bias_correction);
        constants.push_back(c);
    }
    return constants;
}

}  // namespace

void ds_lamb_moments(const ds_segment *segments, int64_t count, const ds_storage *storage, double beta1, double beta2,
                     double eps, double weight_decay, double grad_scale, int32_t bias_correction,
                     int32_t eps_inside_sqrt, double *sums, int32_t threads) {
    for (int64_t i = 0; i < count; ++i) *segments[i].step += 1.0f;
    Lamb c = common(beta1, beta2, eps, weight_decay, eps_inside_sqrt);
    c.grad_scale = float(grad_scale);
    const Lamb *constants = per_segment(segments, count, c, beta1, beta2, bias_correction).data();

    std::vector<int64_t> first_block(size_t(count) + 1);
    for (int64_t i = 0; i < count; ++i)
        first_block[size_t(i) + 1] = first_block[size_t(i)] + ds::block_count(segments[i].numel);
    std::vector<double> partial(size_t(2 * first_block.back()));
    ds::for_each_run(
        count, threads, [&](int64_t i) { return segments[i].numel; },
        [&](int64_t i, int64_t begin, int64_t end) {
            lamb_first(segments[i], *storage, constants[i], partial.data() + 2 * first_block[size_t(i)], begin, end);
        });
    for (int64_t i = 0; i < count; ++i) {
        double param = 0.0, update = 0.0;
        for (int64_t b = first_block[size_t(i)]; b < first_block[size_t(i) + 1]; ++b) {
            param += partial[size_t(2 * b)];
            update += partial[size_t(2 * b + 1)];
        }
        sums[2 * i] = param;
        sums[2 * i + 1] = update;
    }
}

void ds_lamb_apply(const ds_segment *segments, int64_t count, const ds_storage *storage, double lr, double beta1,
                   double beta2, double eps, double weight_decay, int32_t bias_correction, int32_t eps_inside_sqrt,
                   const double *trust_ratio, int32_t threads) {
    const Lamb c = common(beta1, beta2, eps, weight_decay, eps_inside_sqrt);
    const Lamb *constants = per_segment(segments, count, c, beta1, beta2, bias_correction).data();
    const bool stream = ds::streams(segments, count);
    ds::for_each_run(
        count, threads, [&](int64_t i) { return segments[i].numel; },
        [&](int64_t i, int64_t begin, int64_t end) {
            lamb_second(segments[i], *storage, constants[i], float(lr * trust_ratio[i]), begin, end, stream);
        });
}
