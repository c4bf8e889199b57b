// The operations of a program (ds_run): what each does as one of several threads.
//
// An operation has one or two phases; all threads have ended a phase before the next begins.
#pragma once

#include <atomic>

#include "kernel.h"

namespace ds {

// A thread's place among the threads of a run.
struct Team {
    int64_t thread, threads;
    std::atomic<int64_t> *next; // of this operation, zero at its start: numbers of work that nobody has taken
    char *shared;               // bytes that the operation asked for
};

// Calls work(i) for the rows of this thread.
template <class Work>
DS_INLINE void for_own_rows(const Team &team, int64_t rows, Work &&work) {
    for (int64_t row = team.thread; row < rows; row += team.threads) work(row);
}

// The products. `shared_bytes`: of prepared inputs; none for few rows, which every thread prepares for itself.
int64_t product_shared_bytes(const ds_product &product, int64_t rows);
void product_prepare(const ds_product &product, int64_t rows, const Team &team);
void product_compute(const ds_product &product, int64_t rows, const Team &team);

// Attention of pieces whose keys and values are stored.
void attention(const ds_paged_layer &layer, const ds_step &step, const Team &team);

void embedding(const ds_embedding &embedding, const int64_t *tokens, int64_t rows, const Team &team);
// `chosen`: the rows of the stream, null for all.
void norm(const ds_norm &norm, const int64_t *chosen, int64_t rows, const Team &team);
void rotary(const ds_rotary &rotary, const ds_step &step, const Team &team);
void gate(const ds_gate &gate, int64_t rows, const Team &team);
void largest(const ds_largest &largest, int64_t rows, const Team &team);

// `yes` if the condition holds, else `no`, as loops of the compiler's vectors have it: without a branch.
DS_INLINE float choose(bool condition, float yes, float no) {
    const uint32_t mask = -uint32_t(condition);
    return std::bit_cast<float>((std::bit_cast<uint32_t>(yes) & mask) | (std::bit_cast<uint32_t>(no) & ~mask));
}

// exp(x) for x <= 0 to about one unit in the last place; 0 below the smallest normal number.
DS_INLINE float exponential(float given) {
    const bool tiny = given < -87.0f;
    const float x = choose(tiny, -87.0f, given);
    const float whole = float(int32_t(x * 1.44269504f - 0.5f));  // to nearest, as x is not positive
    const float rest = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = (sum * rest) * rest + rest + 1.0f;
    const float power = std::bit_cast<float>(uint32_t(int32_t(whole) + 127) << 23);
    return choose(tiny, 0.0f, sum * power);
}

}  // namespace ds
