// Updates by a momentum over the root of a variance that stays: what 1-bit and 0/1 Adam do once it is frozen.
//
// H. Tang et al.: 1-bit Adam (ICML 2021); Y. Lu et al.: 0/1 Adam (ICLR 2023).
#include <cmath>

#include "kernel.h"

namespace {

struct Rates {  // rounded once
    float variance_correction, eps, rate, decay;
};

DS_INLINE void follow_run_body(float *momentum, const void *grad, int32_t dtype, float scale, float beta, float rest,
                               int64_t begin, int64_t end) {
    alignas(64) float buffer[ds::kBlock];
    for (int64_t i = begin; i < end; i += ds::kBlock) {
        const int64_t n = end - i < ds::kBlock ? end - i : ds::kBlock;
        const float *g = ds::widen(ds::at(grad, i, dtype), dtype, buffer, n);
        float *m = momentum + i;
        DS_IVDEP for (int64_t j = 0; j < n; ++j) m[j] = m[j] * beta + (g[j] * scale) * rest;
    }
}

DS_KERNEL(follow_run,
          (float *momentum, const void *grad, int32_t dtype, float scale, float beta, float rest, int64_t begin,
           int64_t end),
          (momentum, grad, dtype, scale, beta, rest, begin, end))

DS_INLINE float step_of(float momentum, float variance, const Rates &c) {
    return momentum / (std::sqrt(variance / c.variance_correction) + c.eps) * c.rate;
}

DS_INLINE void apply_run_body(const ds_frozen_update &u, const Rates &constants, int64_t begin, int64_t end) {
    const Rates c = constants;
    for (int64_t i = begin; i < end; i += ds::kBlock) {
        const int64_t n = end - i < ds::kBlock ? end - i : ds::kBlock;
        float *w = u.param + i;
        const float *m = u.momentum + i, *v = u.variance + i;
        DS_IVDEP for (int64_t j = 0; j < n; ++j) w[j] = w[j] * c.decay - step_of(m[j], v[j], c);
        if (u.low_precision != nullptr) ds::narrow(ds::at(u.low_precision, i, u.dtype), u.dtype, w, n);
    }
}

DS_KERNEL(apply_run, (const ds_frozen_update &u, const Rates &constants, int64_t begin, int64_t end),
          (u, constants, begin, end))

DS_INLINE void local_run_body(const ds_frozen_update &u, const Rates &constants, int64_t begin, int64_t end) {
    const Rates c = constants;
    for (int64_t i = begin; i < end; i += ds::kBlock) {
        const int64_t n = end - i < ds::kBlock ? end - i : ds::kBlock;
        float *w = u.param + i, *agreed = u.agreed + i, *local = u.local + i;
        const float *m = u.momentum + i, *v = u.variance + i;
        DS_IVDEP for (int64_t j = 0; j < n; ++j) {
            agreed[j] = agreed[j] * c.decay;
            local[j] = local[j] + step_of(m[j], v[j], c);
        }
        if (u.keeps_param) continue;
        DS_IVDEP for (int64_t j = 0; j < n; ++j) w[j] = agreed[j] - local[j];
        if (u.low_precision != nullptr) ds::narrow(ds::at(u.low_precision, i, u.dtype), u.dtype, w, n);
    }
}

DS_KERNEL(local_run, (const ds_frozen_update &u, const Rates &constants, int64_t begin, int64_t end),
          (u, constants, begin, end))

}  // namespace

void ds_follow_momentum(float *momentum, const void *grad, int32_t dtype, int64_t numel, double grad_scale, double beta,
                        int32_t threads) {
    const float scale = float(grad_scale), kept = float(beta), rest = float(1.0 - beta);
    ds::for_each_run(
        1, threads, [&](int64_t) { return numel; },
        [&](int64_t, int64_t begin, int64_t end) {
            follow_run(momentum, grad, dtype, scale, kept, rest, begin, end);
        });
}

void ds_frozen_step(const ds_frozen_update *update, double variance_correction, double eps, double rate, double decay,
                    int32_t threads) {
    const Rates c{float(variance_correction), float(eps), float(rate), float(decay)};
    ds::for_each_run(
        1, threads, [&](int64_t) { return update->numel; },
        [&](int64_t, int64_t begin, int64_t end) {
            if (update->local != nullptr)
                local_run(*update, c, begin, end);
            else
                apply_run(*update, c, begin, end);
        });
}
