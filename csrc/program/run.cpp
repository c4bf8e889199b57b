// A forward as one call: its operations one after another, each by all threads of one parallel region, which meet between
// two of them.
//
// [Note: few meetings] With few rows, operations between products take as long as a meeting, and while one thread computes
// or waits, nobody reads weights, for which a step of decoding takes the time that it does. So threads do not meet where
// what they do next is ready: each computes a norm for itself, the heads that a thread rotates are those whose attention it
// computes, and who computes outputs of a product computes their gate. And who waits asks the memory for the weights that
// come next.
#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "operations.h"

namespace {

// Where threads meet. They turn for a moment, which is what it takes where each has a processor, and then sleep: one that
// turns for longer takes the processor from what it waits for.
class Meeting {
  public:
    explicit Meeting(int64_t members) : members_(members) {}

    // While there are others to wait for, `ahead` is fetched.
    void meet(ds::Ahead &ahead) {
        const uint32_t round = round_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members_) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            round_.notify_all();
            return;
        }
        for (int turn = 0; turn < kTurns; ++turn) {
            if (round_.load(std::memory_order_acquire) != round) return;
            ahead.fetch(kLinesOfTurn);
            pause();
        }
        round_.wait(round, std::memory_order_acquire);
    }

  private:
    static constexpr int kTurns = 4000;
    static constexpr int64_t kLinesOfTurn = 2;

    static void pause() {
#if defined(__SSE2__)
        _mm_pause();
#endif
    }

    const int64_t members_;
    std::atomic<int64_t> arrived_{0};
    std::atomic<uint32_t> round_{0};
};

int64_t rows_of(const ds_operation &operation, const ds_step &step) {
    return operation.on_last != 0 ? step.count : step.rows;
}

void execute(const ds_operation &operation, const ds_step &step, const ds::Team &team) {
    const int64_t rows = rows_of(operation, step);
    const void *arguments = operation.arguments;
    switch (operation.kind) {
        case DS_EMBEDDING:
            return ds::embedding(*static_cast<const ds_embedding *>(arguments), step.tokens, rows, team);
        case DS_NORM:
            return ds::norm(*static_cast<const ds_norm *>(arguments), operation.on_last != 0 ? step.last : nullptr, rows,
                            team);
        case DS_ROTARY: return ds::rotary(*static_cast<const ds_rotary *>(arguments), step, team);
        case DS_ATTENTION: return ds::attention(*static_cast<const ds_paged_layer *>(arguments), step, team);
        case DS_GATE: return ds::gate(*static_cast<const ds_gate *>(arguments), rows, team);
        case DS_LARGEST: return ds::largest(*static_cast<const ds_largest *>(arguments), rows, team);
        default: return;
    }
}

// What one operation asks of the bytes that the threads share.
int64_t shared_bytes(const ds_operation &operation, const ds_step &step) {
    if (operation.kind != DS_PRODUCT) return 0;
    return ds::product_shared_bytes(*static_cast<const ds_product *>(operation.arguments), rows_of(operation, step));
}

// The operation's arguments if it is of that kind, else null.
template <class Arguments>
const Arguments *as(const ds_operation *operation, int32_t kind) {
    return operation == nullptr || operation->kind != kind ? nullptr : static_cast<const Arguments *>(operation->arguments);
}

// Whether all threads may compute the norm, each for its own product. The sum must not be where others still read.
bool for_each_thread(const ds_norm &norm, const ds_product &product, const ds_step &step) {
    return step.rows <= ds::kOwnRows && product.input == norm.output && product.columns == norm.size &&
           product.input_dtype == norm.dtype && (norm.delta == nullptr || norm.sum != norm.stream);
}

// What only the first thread writes for others to read, the others write here.
struct Aside {
    std::vector<float> sum, output;
};

// The norm of all rows, and the product's input from it.
ds_product own_norm(const ds_norm &norm, const ds_product &product, const ds_operation &operation, const ds_step &step,
                    int64_t thread) {
    static thread_local Aside aside;
    ds_norm own = norm;
    ds_product of_it = product;
    if (thread != 0) {
        const size_t numel = size_t(step.rows * norm.size);
        if (aside.sum.size() < numel) aside.sum.resize(numel), aside.output.resize(numel);
        own.sum = aside.sum.data();
        own.output = aside.output.data();
        of_it.input = own.output;
        of_it.input_stride = norm.size;
    }
    ds::norm(own, operation.on_last != 0 ? step.last : nullptr, rows_of(operation, step), {0, 1, nullptr, nullptr});
    return of_it;
}

// Numbers of weights that the products multiply.
int64_t work_of(const ds_operation &operation, const ds_step &step) {
    if (operation.kind != DS_PRODUCT) return 0;
    const ds_product &product = *static_cast<const ds_product *>(operation.arguments);
    int64_t outputs = 0;
    for (int64_t m = 0; m < product.count; ++m) outputs += product.matrices[m].outputs;
    return outputs * product.columns * rows_of(operation, step);
}

// What the threads of a run do.
struct Members {
    const ds_operation *operations;
    int64_t count;
    const ds_step *step;
    ds::Counter *taken;
    char *shared;

    void work(int64_t thread, int64_t threads, Meeting &meeting) const {
        ds::Ahead ahead;
        int64_t asked = -1;  // the product whose weights are asked for
        for (int64_t i = 0; i < count;) {
            i += some(i, {thread, threads, taken + i * threads, shared}, meeting, ahead);
            if (i == count) return;
            const int64_t next = next_product(i);
            if (next != asked && next < count) {
                ahead = ds::product_ahead(*product_at(next), rows_of(operations[next], *step),
                                          {thread, threads, nullptr, nullptr}, gate_of(next));
                ahead.fetch(kFirstLines);
                asked = next;
            }
            meeting.meet(ahead);
        }
    }

  private:
    static constexpr int64_t kFirstLines = 96;

    // Those from `i` on between which threads need not meet. Returns how many.
    int64_t some(int64_t i, const ds::Team &team, Meeting &meeting, ds::Ahead &ahead) const {
        const ds_operation &operation = operations[i];
        const ds_product *next = product_at(i + 1);
        const auto *norm = as<ds_norm>(at(i), DS_NORM);
        if (norm != nullptr && next != nullptr && operations[i + 1].on_last == operation.on_last) {
            if (for_each_thread(*norm, *next, *step))
                return 1 + product(i + 1, own_norm(*norm, *next, operation, *step, team.thread), team, meeting, ahead);
            if (next->input == norm->output && shared_bytes(operations[i + 1], *step) > 0) {
                execute(operation, *step, team);  // a thread prepares the rows that it has normalised
                return 1 + product(i + 1, *next, team, meeting, ahead);
            }
        }
        if (const ds_product *here = product_at(i); here != nullptr) return product(i, *here, team, meeting, ahead);
        execute(operation, *step, team);
        const auto *rotary = as<ds_rotary>(at(i), DS_ROTARY);
        const auto *layer = as<ds_paged_layer>(at(i + 1), DS_ATTENTION);
        if (rotary == nullptr || layer == nullptr || !ds::attention_alike(*layer, *rotary, *step)) return 1;
        ds::attention(*layer, *step, team);
        return 2;
    }

    // With its gate, if that comes next. Returns how many operations these are.
    int64_t product(int64_t i, const ds_product &product, const ds::Team &team, Meeting &meeting,
                    ds::Ahead &ahead) const {
        const int64_t rows = rows_of(operations[i], *step);
        if (ds::product_shared_bytes(product, rows) > 0) {
            ds::product_prepare(product, rows, team);
            meeting.meet(ahead);
        }
        const ds_gate *gate = gate_of(i);
        ds::product_compute(product, rows, team, gate);
        return gate == nullptr ? 1 : 2;
    }

    const ds_operation *at(int64_t i) const { return i < count ? operations + i : nullptr; }

    const ds_product *product_at(int64_t i) const { return as<ds_product>(at(i), DS_PRODUCT); }

    int64_t next_product(int64_t i) const {
        while (i < count && operations[i].kind != DS_PRODUCT) ++i;
        return i;
    }

    // Of product `i`: the gate behind it, if it is of all of its outputs.
    const ds_gate *gate_of(int64_t i) const {
        const ds_gate *gate = as<ds_gate>(at(i + 1), DS_GATE);
        const bool whole = gate != nullptr && operations[i + 1].on_last == operations[i].on_last &&
                           ds::product_gated(*product_at(i), *gate);
        return whole ? gate : nullptr;
    }
};

}  // namespace

void ds_run(const ds_operation *operations, int64_t count, const ds_step *step, int32_t threads) {
    static thread_local std::vector<char> shared;
    int64_t bytes = 0, work = 0;
    for (int64_t i = 0; i < count; ++i) {
        bytes = std::max(bytes, shared_bytes(operations[i], *step));
        work += work_of(operations[i], *step);
    }
    if (work < count * ds::kParallelNumel / 4) threads = 1;
    if (int64_t(shared.size()) < bytes) shared.resize(size_t(bytes));
    const int64_t members = std::max<int64_t>(threads, 1);
    const std::unique_ptr<ds::Counter[]> taken(new ds::Counter[size_t(count * members)]);
    Members run{operations, count, step, taken.get(), shared.data()};
#if defined(_OPENMP)
    if (threads > 1) {
        std::unique_ptr<Meeting> meeting;
#pragma omp parallel num_threads(threads)
        {
#pragma omp single
            meeting = std::make_unique<Meeting>(omp_get_num_threads());
            run.work(omp_get_thread_num(), omp_get_num_threads(), *meeting);
        }
        return;
    }
#endif
    Meeting alone(1);
    run.work(0, 1, alone);
}
