// Counters in shared memory that other processes wait for: spin a little, then sleep in the kernel (futex).
#pragma once

#include <atomic>

#include <chrono>
#include <cstdint>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace ds::shm {

using Clock = std::chrono::steady_clock;

constexpr int kSleepMs = 50;  // how long one sleep lasts at most: then the awaited process is looked at

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A counter that only grows, modulo 2^32. Distances between ranks are tiny, so the sign of a difference orders them.
struct alignas(128) Counter {
    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> sleepers{0};

    bool reached(uint32_t target) const {
        return int32_t(value.load(std::memory_order_acquire) - target) >= 0;
    }

    // The store and the look at `sleepers` are both sequentially consistent, as are the opposite steps in `sleep`:
    // either the sleeper sees the new value or we see the sleeper.
    void set(uint32_t next) {
        value.store(next, std::memory_order_seq_cst);
        if (sleepers.load(std::memory_order_seq_cst) != 0)
            syscall(SYS_futex, &value, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
    }

    bool spin(uint32_t target, int64_t nanoseconds) const {
        if (reached(target)) return true;
        if (nanoseconds <= 0) return false;
        const auto end = Clock::now() + std::chrono::nanoseconds(nanoseconds);
        do {
            for (int i = 0; i < 64; ++i) {
                if (reached(target)) return true;
                relax();
            }
        } while (Clock::now() < end);
        return false;
    }

    // Sleep until the target is reached, or kSleepMs at most.
    bool sleep(uint32_t target) {
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        const uint32_t seen = value.load(std::memory_order_seq_cst);
        if (int32_t(seen - target) < 0) {
            const timespec limit{0, kSleepMs * 1000000L};
            syscall(SYS_futex, &value, FUTEX_WAIT, seen, &limit, nullptr, 0);
        }
        sleepers.fetch_sub(1, std::memory_order_seq_cst);
        return reached(target);
    }
};

static_assert(std::atomic<uint32_t>::is_always_lock_free);

}  // namespace ds::shm
