// [Note: rounds and slots] Every rank owns an outbox of kSlots slots in the shared segment. An operation is a sequence
// of rounds. In round n a rank fills its slot n % kSlots for the others and says so (`published` = n + 1), then reads
// the slots of those it needs something from and says so (`done` = n + 1). A slot may be filled again once every rank
// has done the round that used it before. All ranks go through the same rounds, also where they have nothing to write
// or to read: so two counters per rank are all there is to synchronise, and the data that is under way never exceeds
// size * kSlots * slot_bytes. Writing runs up to kAhead rounds ahead of reading, so that one rank's copying overlaps
// with another's.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "shared_memory.h"
#include "counter.h"

namespace ds::shm {

constexpr int kSlots = 8;
constexpr int kAhead = 6;

// Sizes that follow from the number of ranks: the same on all of them.
struct Geometry {
    int64_t slot_bytes, outbox_offset, segment_bytes;
    explicit Geometry(int32_t size);
};

enum RankState : uint32_t { kAbsent = 0, kAttached = 1, kLeft = 2, kFailed = 3 };

struct alignas(128) RankBlock {
    Counter published, done;
    ds_shm_call calls[kSlots] = {};  // the operation that each slot belongs to: readers compare it with their own
    std::atomic<int32_t> core{-1};   // where the rank ran when it last published something
    alignas(128) std::atomic<int64_t> operations{0};
    std::atomic<int32_t> pid{0};
    std::atomic<uint32_t> state{kAbsent};
    // Of a failed rank, written before its state: why, whom it had waited for, in which call it was, and if the calls
    // did not fit together the one of the rank that it had waited for.
    std::atomic<int32_t> status{DS_SHM_OK}, silent_rank{-1};
    ds_shm_call own_call = {}, their_call = {};
};

struct alignas(128) Header {
    uint64_t magic, token;
    uint32_t abi, size;
};

class Channel {
  public:
    Channel(void *base, int32_t rank, int32_t size);
    ~Channel();

    void start(int64_t spin_ns, int64_t timeout_ms);
    // Runs one operation to its end or failure; once failed, the channel stays so.
    int32_t run(const ds_shm_operation &operation, bool in_background);
    void abandon() { abandoned_.store(true); }

    void explain(ds_shm_failure &failure) const;

  private:
    template <class Need, class Write, class Read>
    bool rounds(int64_t count, Need &&need, Write &&write, Read &&read);
    template <class Write, class Read>
    bool rounds(int64_t count, Write &&write, Read &&read) {
        return rounds(count, [](int64_t) { return int64_t(0); }, write, read);
    }

    bool all_gather(const ds_shm_operation &operation);
    bool reduce_scatter(const ds_shm_operation &operation);
    bool all_reduce(const ds_shm_operation &operation);
    bool all_reduce_small(const ds_shm_operation &operation);
    bool broadcast(const ds_shm_operation &operation);
    bool all_to_all(const ds_shm_operation &operation);
    bool exchange_counts(const ds_shm_operation &operation, int64_t &most);
    bool reduce(const ds_shm_operation &operation);
    bool barrier();

    void combine(const ds_shm_operation &operation, void *output, const void *const *inputs, int64_t numel) const;
    int64_t piece_numel(int64_t bytes) const;
    char *own_slot() { return outbox(rank_) + int64_t(written_ % kSlots) * geometry_.slot_bytes; }
    // Wait for rank `peer` to fill its slot of the round being read; null if it does not.
    const char *slot_of(int32_t peer);
    bool await_free_slot();
    bool await(Counter &counter, uint32_t target, int32_t peer);
    bool fail(int32_t status, int32_t silent_rank);
    bool fail_with(int32_t peer);
    bool mismatch(int32_t peer, const ds_shm_call &theirs);
    bool is_alive(int32_t peer) const;

    RankBlock &block(int32_t rank) { return blocks_[rank]; }
    char *outbox(int32_t rank) { return base_ + geometry_.outbox_offset + rank * kSlots * geometry_.slot_bytes; }

    Geometry geometry_;
    char *base_;
    RankBlock *blocks_;
    int32_t rank_, size_;
    uint32_t written_ = 0, read_ = 0;  // rounds so far
    std::vector<uint32_t> seen_done_;  // by rank: not to touch its counter, a line of another core's cache, every time
    int64_t spin_ns_ = 0, spin_now_ns_ = 0, timeout_ms_ = 600000;
    std::vector<int> pid_fds_;
    std::atomic<bool> abandoned_{false};
    ds_shm_call call_ = {};  // under way
    int32_t status_ = DS_SHM_OK;
    ds_shm_failure failure_ = {0, 0, {}, -1};
};

}  // namespace ds::shm
