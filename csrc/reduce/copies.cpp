// Copies of memory that is not read again soon: past the cache, which stays with whoever uses it.
#include "kernel.h"

namespace {

constexpr int64_t kStreamBytes = int64_t(8) << 20;  // of one call, from which on

}  // namespace

void ds_copy_bytes(const ds_bytes *copies, int64_t count, int32_t threads) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i) total += copies[i].bytes;
    const bool stream = total >= kStreamBytes;
    ds::for_each_run(
        count, threads, [&](int64_t i) { return copies[i].bytes; },
        [&](int64_t i, int64_t begin, int64_t end) {
            char *target = static_cast<char *>(copies[i].target) + begin;
            const char *source = static_cast<const char *>(copies[i].source) + begin;
            if (stream) ds::stream_bytes(target, source, end - begin);
            else std::memcpy(target, source, size_t(end - begin));
            ds::end_copies(stream);
        });
}
