// A forward as one call: its operations one after another, each by all threads of one parallel region, which meet between
// two of them.
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

    void meet() {
        const uint32_t round = round_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members_) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            round_.notify_all();
            return;
        }
        for (int turn = 0; turn < kTurns; ++turn) {
            if (round_.load(std::memory_order_acquire) != round) return;
            pause();
        }
        round_.wait(round, std::memory_order_acquire);
    }

  private:
    static constexpr int kTurns = 4000;

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

void execute(const ds_operation &operation, const ds_step &step, int phase, const ds::Team &team) {
    const int64_t rows = rows_of(operation, step);
    const void *arguments = operation.arguments;
    switch (operation.kind) {
        case DS_EMBEDDING:
            return ds::embedding(*static_cast<const ds_embedding *>(arguments), step.tokens, rows, team);
        case DS_NORM:
            return ds::norm(*static_cast<const ds_norm *>(arguments), operation.on_last != 0 ? step.last : nullptr, rows,
                            team);
        case DS_PRODUCT: {
            const ds_product &product = *static_cast<const ds_product *>(arguments);
            return phase == 0 ? ds::product_prepare(product, rows, team) : ds::product_compute(product, rows, team);
        }
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

// Numbers of weights that the products multiply.
int64_t work_of(const ds_operation &operation, const ds_step &step) {
    if (operation.kind != DS_PRODUCT) return 0;
    const ds_product &product = *static_cast<const ds_product *>(operation.arguments);
    int64_t outputs = 0;
    for (int64_t m = 0; m < product.count; ++m) outputs += product.matrices[m].outputs;
    return outputs * product.columns * rows_of(operation, step);
}

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
    const std::unique_ptr<std::atomic<int64_t>[]> next(new std::atomic<int64_t>[size_t(count)]());
    char *memory = shared.data();

    const auto each = [&](int64_t thread, int64_t members, Meeting &meeting) {
        for (int64_t i = 0; i < count; ++i) {
            const ds::Team team{thread, members, &next[size_t(i)], memory};
            if (shared_bytes(operations[i], *step) > 0) {
                execute(operations[i], *step, 0, team);
                meeting.meet();
            }
            execute(operations[i], *step, 1, team);
            if (i + 1 < count) meeting.meet();
        }
    };
#if defined(_OPENMP)
    if (threads > 1) {
        std::unique_ptr<Meeting> meeting;
#pragma omp parallel num_threads(threads)
        {
#pragma omp single
            meeting = std::make_unique<Meeting>(omp_get_num_threads());
            each(omp_get_thread_num(), omp_get_num_threads(), *meeting);
        }
        return;
    }
#endif
    Meeting alone(1);
    each(0, 1, alone);
}
