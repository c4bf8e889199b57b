// io_uring by its three system calls; the few definitions needed are here, so that any kernel headers will do.
#include "transport.h"

#if defined(__linux__)

#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ds::aio {
namespace {

// Numbers and layouts of the kernel's interface (uapi/linux/io_uring.h); system calls have these numbers everywhere
// but on alpha.
constexpr long kSetup = 425, kEnter = 426;
constexpr unsigned kGetEvents = 1, kOpRead = 22, kOpWrite = 23, kSingleMap = 1, kNoDrop = 2;
constexpr off_t kRings = 0, kEntries = 0x10000000;

struct SubmissionOffsets {
    uint32_t head, tail, mask, count, flags, dropped, array, reserved;
    uint64_t address;
};

struct CompletionOffsets {
    uint32_t head, tail, mask, count, overflow, entries, flags, reserved;
    uint64_t address;
};

struct Parameters {
    uint32_t submission_count, completion_count, flags, cpu, idle, features, workqueue_fd, reserved[3];
    SubmissionOffsets submission;
    CompletionOffsets completion;
};
static_assert(sizeof(Parameters) == 120);

struct Submission {
    uint8_t opcode, flags;
    uint16_t priority;
    int32_t fd;
    uint64_t offset, memory;
    uint32_t bytes, rw_flags;
    uint64_t user_data, more[3];
};
static_assert(sizeof(Submission) == 64);

struct Completion {
    uint64_t user_data;
    int32_t result;
    uint32_t flags;
};

class IoUring final : public Transport {
  public:
    static std::unique_ptr<Transport> make(int depth) {
        auto made = std::make_unique<IoUring>();
        return made->set_up(unsigned(depth)) ? std::move(made) : nullptr;
    }

    ~IoUring() override {
        if (entries_) munmap(entries_, entry_bytes_);
        if (rings_) munmap(rings_, ring_bytes_);
        if (fd_ >= 0) ::close(fd_);
    }

    void submit(Request *const *requests, int count) override {
        unsigned tail = *tail_;
        for (int i = 0; i < count; ++i, ++tail) {
            const unsigned slot = tail & mask_;
            fill(entries_[slot], *requests[i]);
            array_[slot] = slot;
        }
        std::atomic_ref(*tail_).store(tail, std::memory_order_release);
        unsigned left = unsigned(count);
        while (left > 0) {
            const long taken = syscall(kEnter, fd_, left, 0u, 0u, nullptr, 0ul);
            if (taken > 0) left -= unsigned(taken);
            else if (taken < 0 && (errno == EINTR)) continue;
            else if (taken < 0 && (errno == EAGAIN || errno == EBUSY)) usleep(50);
            else return refuse(requests + (unsigned(count) - left), left, taken < 0 ? errno : EIO);
        }
    }

    int wait(Request **complete, int limit) override {
        for (;;) {
            const int count = reap(complete, limit);
            if (count > 0) return count;
            const long status = syscall(kEnter, fd_, 0u, 1u, kGetEvents, nullptr, 0ul);
            if (status < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY) return -errno;
        }
    }

  private:
    bool set_up(unsigned depth) {
        Parameters parameters = {};
        fd_ = int(syscall(kSetup, depth, &parameters));
        // Both features, and the two operations, came with Linux 5.6 or earlier; before, the next transport is used.
        if (fd_ < 0 || !(parameters.features & kSingleMap) || !(parameters.features & kNoDrop)) return false;
        if (!(parameters.features & kReadWriteOperations)) return false;
        return map_rings(parameters);
    }

    bool map_rings(const Parameters &parameters) {
        const auto &in = parameters.submission;
        const auto &out = parameters.completion;
        const size_t in_bytes = in.array + parameters.submission_count * sizeof(uint32_t);
        const size_t out_bytes = out.entries + parameters.completion_count * sizeof(Completion);
        ring_bytes_ = in_bytes > out_bytes ? in_bytes : out_bytes;
        entry_bytes_ = parameters.submission_count * sizeof(Submission);
        char *base = static_cast<char *>(map(ring_bytes_, kRings));
        rings_ = base;
        entries_ = static_cast<Submission *>(map(entry_bytes_, kEntries));
        if (!rings_ || !entries_) return false;
        tail_ = reinterpret_cast<unsigned *>(base + in.tail);
        mask_ = *reinterpret_cast<unsigned *>(base + in.mask);
        array_ = reinterpret_cast<unsigned *>(base + in.array);
        done_head_ = reinterpret_cast<unsigned *>(base + out.head);
        done_tail_ = reinterpret_cast<unsigned *>(base + out.tail);
        done_mask_ = *reinterpret_cast<unsigned *>(base + out.mask);
        done_ = reinterpret_cast<Completion *>(base + out.entries);
        return true;
    }

    void *map(size_t bytes, off_t offset) const {
        void *at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, offset);
        return at == MAP_FAILED ? nullptr : at;
    }

    static void fill(Submission &entry, Request &request) {
        entry = Submission{};
        entry.opcode = request.write ? kOpWrite : kOpRead;
        entry.fd = request.fd;
        entry.offset = uint64_t(request.offset);
        entry.memory = reinterpret_cast<uint64_t>(request.memory);
        entry.bytes = uint32_t(request.bytes);
        entry.user_data = reinterpret_cast<uint64_t>(&request);
    }

    // The kernel takes no more: pull the entries back and report them as complete.
    void refuse(Request *const *requests, unsigned count, int error) {
        std::atomic_ref(*tail_).store(*tail_ - count, std::memory_order_release);
        for (unsigned i = 0; i < count; ++i) {
            requests[i]->result = -error;
            refused_.push_back(requests[i]);
        }
    }

    int reap(Request **complete, int limit) {
        int count = 0;
        for (; count < limit && !refused_.empty(); refused_.pop_front()) complete[count++] = refused_.front();
        unsigned head = *done_head_;
        const unsigned tail = std::atomic_ref(*done_tail_).load(std::memory_order_acquire);
        for (; count < limit && head != tail; ++head) {
            const Completion &entry = done_[head & done_mask_];
            complete[count] = reinterpret_cast<Request *>(entry.user_data);
            complete[count++]->result = entry.result;
        }
        std::atomic_ref(*done_head_).store(head, std::memory_order_release);
        return count;
    }

    static constexpr unsigned kReadWriteOperations = 1u << 3;  // IORING_FEAT_RW_CUR_POS: Linux 5.6

    int fd_ = -1;
    size_t ring_bytes_ = 0, entry_bytes_ = 0;
    void *rings_ = nullptr;
    Submission *entries_ = nullptr;
    unsigned *tail_ = nullptr, *array_ = nullptr, *done_head_ = nullptr, *done_tail_ = nullptr;
    unsigned mask_ = 0, done_mask_ = 0;
    Completion *done_ = nullptr;
    std::deque<Request *> refused_;
};

}  // namespace

std::unique_ptr<Transport> make_io_uring(int depth) { return IoUring::make(depth); }

}  // namespace ds::aio

#endif
