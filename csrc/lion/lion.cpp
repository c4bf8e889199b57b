// Lion: X. Chen et al., Symbolic Discovery of Optimization Algorithms (2023), algorithm 2.
#include "kernel.h"

namespace {

struct Lion {
    float grad_scale;
    float beta1, rest1;  // interpolation of the update
    float beta2, rest2;  // interpolation of the momentum
    float decay;
    float lr;
};

DS_INLINE void lion_block(float *__restrict param, const float *__restrict grad, float *__restrict exp_avg,
                          const Lion &c, int64_t n) {
    DS_IVDEP for (int64_t i = 0; i < n; ++i) {
        const float g = grad[i] * c.grad_scale;
        const float m = exp_avg[i];
        const float direction = c.beta1 * m + c.rest1 * g;
        // sign(0) = 0; NaN stays NaN
        const float sign = direction > 0.0f ? 1.0f : direction < 0.0f ? -1.0f : direction;
        param[i] = param[i] * c.decay - c.lr * sign;
        exp_avg[i] = c.beta2 * m + c.rest2 * g;
    }
}

DS_INLINE void lion_run_body(const ds_segment &s, const ds_storage &type, const Lion &constants, int64_t begin,
                             int64_t end, bool stream) {
    const Lion c = constants;
    alignas(64) float buffer[3][ds::kBlock];
    const int64_t step = ds::block_numel(s);
    for (int64_t i = begin; i < end; i += step) {
        const int64_t n = end - i < step ? end - i : step;
        const ds::Operand param = ds::open(s.param, i, type.param, buffer[0], n);
        const ds::Operand exp_avg = ds::open(s.state1, i, type.state, buffer[1], n);
        const float *grad = ds::widen(ds::at(s.grad, i, type.grad), type.grad, buffer[2], n);
        lion_block(param.values, grad, exp_avg.values, c, n);
        ds::close(param, n);
        ds::close(exp_avg, n);
        ds::copy_out(s, type, i, param.values, n, stream);
    }
    ds::end_copies(stream);
}

DS_KERNEL(lion_run,
          (const ds_segment &s, const ds_storage &type, const Lion &constants, int64_t begin, int64_t end,
           bool stream),
          (s, type, constants, begin, end, stream))

}  // namespace

void ds_lion(const ds_segment *segments, int64_t count, const ds_storage *storage, double lr, double beta1,
             double beta2, double weight_decay, double grad_scale, int32_t threads) {
    const Lion c{.grad_scale = float(grad_scale),
                 .beta1 = float(beta1),
                 .rest1 = float(1.0 - beta1),
                 .beta2 = float(beta2),
                 .rest2 = float(1.0 - beta2),
                 .decay = float(1.0 - lr * weight_decay),
                 .lr = float(lr)};
    for (int64_t i = 0; i < count; ++i) *segments[i].step += 1.0f;
    const bool stream = ds::streams(segments, count);
    ds::for_each_run(
        count, threads, [&](int64_t i) { return segments[i].numel; },
        [&](int64_t i, int64_t begin, int64_t end) {
            lion_run(segments[i], *storage, c, begin, end, stream);
        });
}
