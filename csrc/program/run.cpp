// A forward as one call: its operations one after another, each by all threads of one parallel region. Between two of them
// threads meet at a barrier, which costs less than a millionth of a second, and no other language is heard in between.
#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "operations.h"

namespace {

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
        default: return;
    }
}

// What one operation asks of the bytes that the threads share.
int64_t shared_bytes(const ds_operation &operation, const ds_step &step) {
    if (operation.kind != DS_PRODUCT) return 0;
    return ds::product_shared_bytes(*static_cast<const ds_product *>(operation.arguments), rows_of(operation, step));
}

}  // namespace

void ds_run(const ds_operation *operations, int64_t count, const ds_step *step, int32_t threads) {
    static thread_local std::vector<char> shared;
    int64_t bytes = 0;
    for (int64_t i = 0; i < count; ++i) bytes = std::max(bytes, shared_bytes(operations[i], *step));
    if (int64_t(shared.size()) < bytes) shared.resize(size_t(bytes));
    const std::unique_ptr<std::atomic<int64_t>[]> next(new std::atomic<int64_t>[size_t(count)]());
    char *memory = shared.data();

    const auto each = [&](int64_t thread, int64_t members, const auto &meet) {
        for (int64_t i = 0; i < count; ++i) {
            const ds::Team team{thread, members, &next[size_t(i)], memory};
            if (shared_bytes(operations[i], *step) > 0) {
                execute(operations[i], *step, 0, team);
                meet();
            }
            execute(operations[i], *step, 1, team);
            if (i + 1 < count) meet();
        }
    };
#if defined(_OPENMP)
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        each(omp_get_thread_num(), omp_get_num_threads(), [] {
#pragma omp barrier
        });
        return;
    }
#endif
    each(0, 1, [] {});
}
