#include "buffers.h"

#if defined(__linux__)

#include <algorithm>
#include <chrono>
#include <sys/mman.h>

namespace ds::aio {
namespace {

constexpr int64_t kHugePage = int64_t(2) << 20;

int64_t now_ns() {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

}  // namespace

Buffers::~Buffers() {
    for (const Chunk &chunk : chunks_) munmap(chunk.mapping, size_t(chunk.bytes));
}

char *Buffers::take() {
    if (spare_.empty() && !grow()) return nullptr;
    char *buffer = spare_.back();
    spare_.pop_back();
    return buffer;
}

bool Buffers::grow() {
    const int64_t useful = huge_ ? std::max(kHugePage, bytes_) : bytes_;
    const int64_t mapped = huge_ ? useful + kHugePage : useful;
    void *mapping = mmap(nullptr, size_t(mapped), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) return false;
    chunks_.push_back({mapping, mapped});
    char *begin = static_cast<char *>(mapping);
    if (huge_) {
        begin += -reinterpret_cast<intptr_t>(begin) & (kHugePage - 1);
        const int64_t before = now_ns();
        madvise(begin, size_t(useful), patience_ns_ > 0 ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
        for (int64_t at = 0; at < useful; at += kHugePage) begin[at] = 0;
        patience_ns_ -= now_ns() - before;
    }
    for (int64_t at = 0; at + bytes_ <= useful; at += bytes_) spare_.push_back(begin + at);
    return true;
}

}  // namespace ds::aio

#endif
