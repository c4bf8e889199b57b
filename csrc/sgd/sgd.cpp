// Stochastic gradient descent with momentum, in the form of torch.optim.SGD.
#include <vector>

#include "kernel.h"

namespace {

enum class Momentum : int32_t { kNone, kFirst, kPlain, kNesterov, kFirstNesterov };

struct Sgd {
    float grad_scale;
    float weight_decay;
    float momentum, rest;  // rest = 1 - dampening
    float lr;
};

template <Momentum kind>
DS_INLINE void sgd_block(float *__restrict param, const float *__restrict grad, float *__restrict buffer, const Sgd &c,
                         int64_t n) {
    DS_IVDEP for (int64_t i = 0; i < n; ++i) {
        const float g = grad[i] * c.grad_scale + c.weight_decay * param[i];
        float direction = g;
        if constexpr (kind != Momentum::kNone) {
            constexpr bool first = kind == Momentum::kFirst || kind == Momentum::kFirstNesterov;
            const float b = first ? g : c.momentum * buffer[i] + c.rest * g;
            buffer[i] = b;
            constexpr bool nesterov = kind == Momentum::kNesterov || kind == Momentum::kFirstNesterov;
            direction = nesterov ? g + c.momentum * b : b;
        }
        param[i] = param[i] - c.lr * direction;
    }
}

DS_INLINE void sgd_run_body(const ds_segment &s, const ds_storage &type, const Sgd &constants, Momentum kind,
                            int64_t begin, int64_t end, bool stream) {
    const Sgd c = constants;
    alignas(64) float buffer[3][ds::kBlock];
    const int64_t step = ds::block_numel(s);
    for (int64_t i = begin; i < end; i += step) {
        const int64_t n = end - i < step ? end - i : step;
        const ds::Operand param = ds::open(s.param, i, type.param, buffer[0], n);
        const float *grad = ds::widen(ds::at(s.grad, i, type.grad), type.grad, buffer[1], n);
        if (kind == Momentum::kNone) {
            sgd_block<Momentum::kNone>(param.values, grad, nullptr, c, n);
        } else {
            const ds::Operand momentum = ds::open(s.state1, i, type.state, buffer[2], n);
            switch (kind) {
                case Momentum::kFirst: sgd_block<Momentum::kFirst>(param.values, grad, momentum.values, c, n); break;
                case Momentum::kPlain: sgd_block<Momentum::kPlain>(param.values, grad, momentum.values, c, n); break;
                case Momentum::kNesterov:
                    sgd_block<Momentum::kNesterov>(param.values, grad, momentum.values, c, n);
                    break;
                default: sgd_block<Momentum::kFirstNesterov>(param.values, grad, momentum.values, c, n);
            }
            ds::close(momentum, n);
        }
        ds::close(param, n);
        ds::copy_out(s, type, i, param.values, n, stream);
    }
    ds::end_copies(stream);
}

DS_KERNEL(sgd_run,
          (const ds_segment &s, const ds_storage &type, const Sgd &constants, Momentum kind, int64_t begin,
           int64_t end, bool stream),
          (s, type, constants, kind, begin, end, stream))

}  // namespace

void ds_sgd(const ds_segment *segments, int64_t count, const ds_storage *storage, double lr, double momentum,
            double dampening, double weight_decay, double grad_scale, int32_t nesterov, int32_t threads) {
    const Sgd c{.grad_scale = float(grad_scale),
                .weight_decay = float(weight_decay),
                .momentum = float(momentum),
                .rest = float(1.0 - dampening),
                .lr = float(lr)};
    static thread_local std::vector<Momentum> kinds;
    kinds.resize(size_t(count));
    for (int64_t i = 0; i < count; ++i) {
        const bool first = *segments[i].step == 0.0f;
        *segments[i].step += 1.0f;
        kinds[size_t(i)] = segments[i].state1 == nullptr ? Momentum::kNone
                           : nesterov != 0 ? (first ? Momentum::kFirstNesterov : Momentum::kNesterov)
                                           : (first ? Momentum::kFirst : Momentum::kPlain);
    }
    const Momentum *all = kinds.data();
    const bool stream = ds::streams(segments, count);
    ds::for_each_run(
        count, threads, [&](int64_t i) { return segments[i].numel; },
        [&](int64_t i, int64_t begin, int64_t end) {
            sgd_run(segments[i], *storage, c, all[i], begin, end, stream);
        });
}
