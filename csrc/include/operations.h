// The operations of a program (ds_run): what each does as one of several threads.
//
// An operation has one or two phases; all threads have ended a phase before the next begins.
#pragma once

#include <atomic>

#include "exponential.h"
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

}  // namespace ds
