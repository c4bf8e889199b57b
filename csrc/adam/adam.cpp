// Adam and AdamW on many tensors in one pass over memory.
//
// D. P. Kingma, J. Ba: Adam: A Method for Stochastic Optimization (ICLR 2015);
// I. Loshchilov, F. Hutter: Decoupled Weight Decay Regularization (ICLR 2019).
#include <cmath>
#include <vector>

#include "kernel.h"

namespace {

// Constants of one update, computed in fp64 and rounded once.
struct Adam {
    float grad_scale;
    float beta1, rest1;  // rest = 1 - beta
    float beta2, rest2;
    float eps;
    float decay;            // decoupled: factor of the parameter
    float l2;               // not decoupled: weight decay that joins the gradient
    float step_size;        // lr / bias_correction1
    float inv_correction2;  // 1 / sqrt(bias_correction2)
    bool decoupled;
};

template <bool kL2>
DS_INLINE void adam_block(float *__restrict param, const float *__restrict grad, float *__restrict exp_avg,
                          float *__restrict exp_avg_sq, const Adam &c, int64_t n) {
    DS_IVDEP for (int64_t i = 0; i < n; ++i) {
        float g = grad[i] * c.grad_scale;
        if constexpr (kL2) g = g + c.l2 * param[i];
        const float m = c.beta1 * exp_avg[i] + c.rest1 * g;
        const float v = c.beta2 * exp_avg_sq[i] + (c.rest2 * g) * g;
        const float denominator = std::sqrt(v) * c.inv_correction2 + c.eps;
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        param[i] = param[i] * c.decay - (c.step_size * m) / denominator;
    }
}

DS_INLINE void adam_run_body(const ds_segment &s, const ds_storage &type, const Adam &constants, int64_t begin,
                             int64_t end, bool stream) {
    const Adam c = constants;
    alignas(64) float buffer[4][ds::kBlock];
    const int64_t step = ds::block_numel(s);
    for (int64_t i = begin; i < end; i += step) {
        const int64_t n = end - i < step ? end - i : step;
        const ds::Operand param = ds::open(s.param, i, type.param, buffer[0], n);
        const ds::Operand exp_avg = ds::open(s.state1, i, type.state, buffer[1], n);
        const ds::Operand exp_avg_sq = ds::open(s.state2, i, type.state, buffer[2], n);
        const float *grad = ds::widen(ds::at(s.grad, i, type.grad), type.grad, buffer[3], n);
        if (c.decoupled)
            adam_block<false>(param.values, grad, exp_avg.values, exp_avg_sq.values, c, n);
        else
            adam_block<true>(param.values, grad, exp_avg.values, exp_avg_sq.values, c, n);
        ds::close(param, n);
        ds::close(exp_avg, n);
        ds::close(exp_avg_sq, n);
        ds::copy_out(s, type, i, param.values, n, stream);
    }
    ds::end_copies(stream);
}

DS_KERNEL(adam_run,
          (const ds_segment &s, const ds_storage &type, const Adam &constants, int64_t begin, int64_t end,
           bool stream),
          (s, type, constants, begin, end, stream))

}  // namespace

void ds_adam(const ds_segment *segments, int64_t count, const ds_storage *storage, double lr, double beta1,
             double beta2, double eps, double weight_decay, double grad_scale, int32_t bias_correction,
             int32_t decoupled, int32_t threads) {
    Adam c{};
    c.grad_scale = float(grad_scale);
    c.beta1 = float(beta1);
    c.rest1 = float(1.0 - beta1);
    c.beta2 = float(beta2);
    c.rest2 = float(1.0 - beta2);
    c.eps = float(eps);
    c.decoupled = decoupled != 0 || weight_decay == 0.0;
    c.decay = decoupled != 0 ? float(1.0 - lr * weight_decay) : 1.0f;
    c.l2 = float(weight_decay);

    // Segments may have seen different numbers of updates (parameters that were unused or frozen for a while).
    static thread_local std::vector<Adam> constants;
    constants.resize(size_t(count));
    float last_step = -1.0f;
    for (int64_t i = 0; i < count; ++i) {
        const float step = *segments[i].step += 1.0f;
        if (step != last_step) {
            last_step = step;
            c.step_size = float(bias_correction ? lr / (1.0 - std::pow(beta1, double(step))) : lr);
            c.inv_correction2 = bias_correction ? float(1.0 / std::sqrt(1.0 - std::pow(beta2, double(step)))) : 1.0f;
        }
        constants[size_t(i)] = c;
    }
    const Adam *all = constants.data();
    const bool stream = ds::streams(segments, count);
    ds::for_each_run(
        count, threads, [&](int64_t i) { return segments[i].numel; },
        [&](int64_t i, int64_t begin, int64_t end) {
            adam_run(segments[i], *storage, all[i], begin, end, stream);
        });
}
