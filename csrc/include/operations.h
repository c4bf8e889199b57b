// The operations of a program (ds_run): what each does as one of several threads.
//
// An operation has one or two phases; all threads have ended a phase before the next begins, but where the next needs of
// each thread only what the same thread has done.
#pragma once

#include <atomic>

#include "exponential.h"
#include "kernel.h"

namespace ds {

// A number in a cache line of its own.
struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
};

// A thread's place among the threads of a run.
struct Team {
    int64_t thread, threads;
    Counter *taken; // [threads] of this operation, zero at its start: how much of each thread's share is taken
    char *shared;   // bytes that the operation asked for

    // The first number of a thread's share of `units`.
    int64_t share_begin(int64_t of, int64_t units) const { return units * of / threads; }
};

// Calls work(i) for the rows of this thread.
template <class Work>
DS_INLINE void for_own_rows(const Team &team, int64_t rows, Work &&work) {
    for (int64_t row = team.thread; row < rows; row += team.threads) work(row);
}

// Calls work(i) for the numbers of this thread's share, a run of them.
template <class Work>
DS_INLINE void for_own_share(const Team &team, int64_t units, Work &&work) {
    const int64_t end = team.share_begin(team.thread + 1, units);
    for (int64_t i = team.share_begin(team.thread, units); i < end; ++i) work(i);
}

// The same as runs, work(begin, end), and then for what is left of the shares of others: a thread that has no processor for
// a while leaves its work to them. A run is half of what is left, as taking one makes a thread wait for its loads.
template <class Work>
DS_INLINE void for_shares(const Team &team, int64_t units, Work &&work) {
    for (int64_t k = 0; k < team.threads; ++k) {
        const int64_t owner = (team.thread + k) % team.threads;
        const int64_t begin = team.share_begin(owner, units), share = team.share_begin(owner + 1, units) - begin;
        std::atomic<int64_t> &taken = team.taken[owner].value;
        for (int64_t at = taken.load(std::memory_order_relaxed); at < share;) {
            const int64_t run = team.threads == 1 ? share : (share - at + 1) / 2;
            if (!taken.compare_exchange_weak(at, at + run)) continue;
            work(begin + at, begin + at + run);
            at += run;
        }
    }
}

// Up to so many rows, every thread makes the inputs of a product for itself, which is sooner done than waiting for others.
constexpr int64_t kOwnRows = 2;

// Memory that a thread is going to read: lines of it are asked for while there is nothing else to do.
class Ahead {
  public:
    Ahead() = default;
    Ahead(const char *memory, int64_t bytes) : next_(memory), end_(memory + bytes) {}

    void fetch(int64_t lines) {
        for (; lines > 0 && next_ < end_; --lines, next_ += 64) ask_for(next_);
    }

  private:
    const char *next_ = nullptr, *end_ = nullptr;
};

// The products. `shared_bytes`: of prepared inputs; none for few rows, which every thread prepares for itself.
int64_t product_shared_bytes(const ds_product &product, int64_t rows);
void product_prepare(const ds_product &product, int64_t rows, const Team &team);
// `gate`: what makes activations of the outputs, done with them; or null.
void product_compute(const ds_product &product, int64_t rows, const Team &team, const ds_gate *gate);
// What a thread reads first of the weights.
Ahead product_ahead(const ds_product &product, int64_t rows, const Team &team, const ds_gate *gate);
// Whether `gate` takes all outputs of the product, and nothing else.
bool product_gated(const ds_product &product, const ds_gate &gate);

// Attention of pieces whose keys and values are stored.
void attention(const ds_paged_layer &layer, const ds_step &step, const Team &team);
// Whether each thread's share of it needs no more of the rotation before it than what the same thread's share of that was.
bool attention_alike(const ds_paged_layer &layer, const ds_rotary &rotary, const ds_step &step);

void embedding(const ds_embedding &embedding, const int64_t *tokens, int64_t rows, const Team &team);
// `chosen`: the rows of the stream, null for all.
void norm(const ds_norm &norm, const int64_t *chosen, int64_t rows, const Team &team);
void rotary(const ds_rotary &rotary, const ds_step &step, const Team &team);
void gate(const ds_gate &gate, int64_t rows, const Team &team);
// Numbers [begin, end) of all rows, by one thread.
void gate_columns(const ds_gate &gate, int64_t rows, int64_t begin, int64_t end);
void largest(const ds_largest &largest, int64_t rows, const Team &team);

}  // namespace ds
