// Memory for results that a kernel is about to fill.
//
// [Note: large pages] An allocator maps large tensors for themselves and gives them back when they are freed, so each
// result costs a page fault, and a page to clear, per 4 KiB: for a kernel that passes over its tensors once, as much as its
// arithmetic. Asked for, Linux gives 2 MiB at a time (transparent huge pages set to "madvise", as they usually are, or
// "always"); where it has none, small pages as ever.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ds {

constexpr int64_t kLargePage = int64_t(2) << 20;
constexpr int64_t kLargeResult = int64_t(8) << 20;  // smaller ones are often memory that was used before

inline void ask_for_large_pages(void *memory, int64_t bytes, int64_t least = kLargeResult) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (memory == nullptr || bytes < least) return;
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kLargePage - 1) & ~uintptr_t(kLargePage - 1);
    const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + uintptr_t(bytes)) & ~uintptr_t(kLargePage - 1);
    if (begin < end) (void)madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes, (void)least;
#endif
}

}  // namespace ds
