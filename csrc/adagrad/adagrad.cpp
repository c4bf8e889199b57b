// Adagrad: J. Duchi, E. Hazan, Y. Singer, Adaptive Subgradient Methods (JMLR 2011), with the learning-rate decay of
// torch.optim.Adagrad.
#include <cmath>
#include <vector>

#include "kernel.h"

namespace {

struct Adagrad {
    float grad_scale;
    float weight_decay;
    float eps;
    float lr;  // after decay
};

DS_INLINE void adagrad_block(float *__restrict param, const float *__restrict grad, float *__restrict sum,
                             const Adagrad &c, int64_t n) {
    DS_IVDEP for (int64_t i = 0; i < n; ++i) {
        const float g = grad[i] * c.grad_scale + c.weight_decay * param[i];
        const float s = sum[i] + g * g;
        sum[i] = s;
        param[i] = param[i] - (c.lr * g) / (std::sqrt(s) + c.eps);
    }
}

DS_INLINE void adagrad_run_body(const ds_segment &s, const ds_storage &type, const Adagrad &constants, int64_t begin,
                                int64_t end, bool stream) {
    const Adagrad c = constants;
    alignas(64) float buffer[3][ds::kBlock];
    const int64_t step = ds::block_numel(s);
    for (int64_t i = begin; i < end; i += step) {
        const int64_t n = end - i < step ? end - i : step;
        const ds::Operand param = ds::open(s.param, i, type.param, buffer[0], n);
        const ds::Operand sum = ds::open(s.state1, i, type.state, buffer[1], n);
        const float *grad = ds::widen(ds::at(s.grad, i, type.grad), type.grad, buffer[2], n);
        adagrad_block(param.values, grad, sum.values, c, n);
        ds::close(param, n);
        ds::close(sum, n);
        ds::copy_out(s, type, i, param.values, n, stream);
    }
    ds::end_copies(stream);
}

DS_KERNEL(adagrad_run,
          (const ds_segment &s, const ds_storage &type, const Adagrad &constants, int64_t begin, int64_t end,
           bool stream),
          (s, type, constants, begin, end, stream))

}  // namespace

void ds_adagrad(const ds_segment *segments, int64_t count, const ds_storage *storage, double lr, double lr_decay,
                double eps, double weight_decay, double grad_scale, int32_t threads) {
    static thread_local std::vector<Adagrad> constants;
    constants.resize(size_t(count));
    for (int64_t i = 0; i < count; ++i) {
        const double step = double(*segments[i].step += 1.0f);
        constants[size_t(i)] = {.grad_scale = float(grad_scale),
                                .weight_decay = float(weight_decay),
                                .eps = float(eps),
                                .lr = float(lr / (1.0 + (step - 1.0) * lr_decay))};
    }
    const Adagrad *all = constants.data();
    const bool stream = ds::streams(segments, count);
    ds::for_each_run(
        count, threads, [&](int64_t i) { return segments[i].numel; },
        [&](int64_t i, int64_t begin, int64_t end) {
            adagrad_run(segments[i], *storage, all[i], begin, end, stream);
        });
}
