#include "channel.h"

#if defined(__linux__)

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "combine.h"

namespace ds::shm {

namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kPieceBytes = 128 << 10;     // what one rank gets from one other in a round of a large operation
constexpr int64_t kSegmentBytes = 64 << 20;    // bound on all slots together
constexpr int64_t kBackgroundSpin = 5;         // the thread in the background spins for a fraction of the time
constexpr int64_t kSmallReduceBytes = 64 << 10;  // an all_reduce up to here goes whole to everyone, in one round

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

}  // namespace

Geometry::Geometry(int32_t size) {
    const int64_t others = std::max(1, size - 1);
    const int64_t wanted = kPieceBytes * std::max<int64_t>(2, others);
    const int64_t bound = std::max<int64_t>(kSegmentBytes / (int64_t(size) * kSlots), 64 * others);
    slot_bytes = round_up(std::min(wanted, bound), kPage);
    outbox_offset = round_up(sizeof(Header) + size * sizeof(RankBlock), kPage);
    segment_bytes = outbox_offset + size * kSlots * slot_bytes;
}

// ---- joining and leaving ---------------------------------------------------------------------------------------------

Channel::Channel(void *base, int32_t rank, int32_t size)
    : geometry_(size), base_(static_cast<char *>(base)),
      blocks_(reinterpret_cast<RankBlock *>(base_ + sizeof(Header))), rank_(rank), size_(size),
      seen_done_(size_t(size), 0) {
    block(rank).pid.store(getpid());
    block(rank).state.store(kAttached);
}

void Channel::start(int64_t spin_ns, int64_t timeout_ms) {
    spin_ns_ = spin_ns;
    timeout_ms_ = timeout_ms;
    if (!pid_fds_.empty()) return;
    pid_fds_.assign(size_t(size_), -1);
#if defined(SYS_pidfd_open)
    for (int32_t peer = 0; peer < size_; ++peer)
        if (peer != rank_) pid_fds_[size_t(peer)] = int(syscall(SYS_pidfd_open, block(peer).pid.load(), 0));
#endif
}

Channel::~Channel() {
    if (block(rank_).state.load() == kAttached) block(rank_).state.store(kLeft);
    for (const int fd : pid_fds_)
        if (fd >= 0) close(fd);
    munmap(base_, size_t(geometry_.segment_bytes));
}

// ---- waiting ---------------------------------------------------------------------------------------------------------

bool Channel::await(Counter &counter, uint32_t target, int32_t peer) {
    if (counter.reached(target)) return true;
    // A rank that shares this very core can only go on once this one sleeps.
    const bool neighbour = block(peer).core.load(std::memory_order_relaxed) == sched_getcpu();
    if (!neighbour && counter.spin(target, spin_now_ns_)) return true;
    const auto deadline = Clock::now() + std::chrono::milliseconds(timeout_ms_);
    for (;;) {
        if (counter.sleep(target)) return true;
        if (abandoned_.load()) return fail(DS_SHM_CLOSED, -1);
        const uint32_t state = block(peer).state.load();
        const bool alive = is_alive(peer);
        if (counter.reached(target)) return true;  // its last deed before it ended or left
        if (state == kFailed) return fail_with(peer);
        if (state == kLeft) return fail(DS_SHM_LEFT, peer);
        if (!alive) return fail(DS_SHM_DEAD, peer);
        if (Clock::now() > deadline) return fail(DS_SHM_TIMEOUT, peer);
    }
}

bool Channel::fail(int32_t status, int32_t silent_rank) {
    status_ = status;
    failure_.operations = block(rank_).operations.load();
    failure_.silent_rank = silent_rank;
    if (silent_rank >= 0) failure_.their_operations = block(silent_rank).operations.load();
    RankBlock &own = block(rank_);
    own.status.store(status);
    own.silent_rank.store(silent_rank);
    own.own_call = call_;
    own.their_call = failure_.their_call;
    own.state.store(status == DS_SHM_CLOSED ? kLeft : kFailed);  // who waits for us learns the reason
    return false;
}

// The awaited rank has failed: for the same reason, so have we.
bool Channel::fail_with(int32_t peer) {
    const RankBlock &failed = block(peer);
    const int32_t status = failed.status.load(), silent_rank = failed.silent_rank.load();
    if (status != DS_SHM_MISMATCH) return fail(status, silent_rank);
    return silent_rank == rank_ ? mismatch(peer, failed.own_call) : mismatch(silent_rank, failed.their_call);
}

bool Channel::mismatch(int32_t peer, const ds_shm_call &theirs) {
    failure_.their_call = theirs;
    return fail(DS_SHM_MISMATCH, peer);
}

void Channel::explain(ds_shm_failure &failure) const { failure = failure_; }

// A descriptor of a process becomes readable when it ends, also while nobody has reaped it and its number lives on.
bool Channel::is_alive(int32_t peer) const {
    const int fd = pid_fds_.empty() ? -1 : pid_fds_[size_t(peer)];
    if (fd < 0) return kill(blocks_[peer].pid.load(), 0) == 0 || errno == EPERM;
    pollfd ended{fd, POLLIN, 0};
    return poll(&ended, 1, 0) <= 0;
}

bool Channel::await_free_slot() {
    const uint32_t before = written_ + 1 - uint32_t(kSlots);  // 0 or less at first: nothing to wait for
    for (int32_t step = 1; step < size_; ++step) {
        const int32_t peer = (rank_ + step) % size_;
        uint32_t &seen = seen_done_[size_t(peer)];
        if (int32_t(seen - before) >= 0) continue;
        if (!await(block(peer).done, before, peer)) return false;
        seen = block(peer).done.value.load(std::memory_order_acquire);
    }
    return true;
}

const char *Channel::slot_of(int32_t peer) {
    if (!await(block(peer).published, read_ + 1, peer)) return nullptr;
    const ds_shm_call &theirs = block(peer).calls[read_ % kSlots];
    if (std::memcmp(&theirs, &call_, sizeof call_) != 0) {
        mismatch(peer, theirs);
        return nullptr;
    }
    return outbox(peer) + int64_t(read_ % kSlots) * geometry_.slot_bytes;
}

// write(n, slot) fills the own slot for round n, once at least need(n) rounds have been read; read(n) uses slot_of().
template <class Need, class Write, class Read>
bool Channel::rounds(int64_t count, Need &&need, Write &&write, Read &&read) {
    int64_t ahead = 0;
    for (int64_t n = 0; n < count; ++n) {
        for (; ahead < count && ahead < n + kAhead && need(ahead) <= n; ++ahead) {
            if (!await_free_slot()) return false;
            write(ahead, own_slot());
            block(rank_).calls[written_ % kSlots] = call_;
            block(rank_).core.store(sched_getcpu(), std::memory_order_relaxed);
            block(rank_).published.set(++written_);
        }
        if (!read(n)) return false;
        block(rank_).done.set(++read_);
    }
    return true;
}

// ---- operations ------------------------------------------------------------------------------------------------------

int32_t Channel::run(const ds_shm_operation &operation, bool in_background) {
    if (status_ != DS_SHM_OK) return status_;
    spin_now_ns_ = in_background ? spin_ns_ / kBackgroundSpin : spin_ns_;
    call_ = operation.call;
    block(rank_).operations.fetch_add(1);
    switch (call_.kind) {
        case DS_SHM_ALL_GATHER: all_gather(operation); break;
        case DS_SHM_REDUCE_SCATTER: reduce_scatter(operation); break;
        case DS_SHM_ALL_REDUCE:
        case DS_SHM_ALL_REDUCE_MAX: all_reduce(operation); break;
        case DS_SHM_BROADCAST: broadcast(operation); break;
        case DS_SHM_ALL_TO_ALL: all_to_all(operation); break;
        case DS_SHM_REDUCE: reduce(operation); break;
        default: barrier();
    }
    return status_;
}

void Channel::combine(const ds_shm_operation &operation, void *output, const void *const *inputs,
                      int64_t numel) const {
    if (operation.call.kind == DS_SHM_ALL_REDUCE_MAX)
        max_chunks(output, inputs, size_, operation.call.input_dtype, numel);
    else
        sum_chunks(output, operation.call.output_dtype, inputs, size_, operation.call.input_dtype, numel, operation.scale);
}

// Elements of `bytes` size that fit where a slot is divided among the other ranks.
int64_t Channel::piece_numel(int64_t bytes) const {
    const int64_t part = geometry_.slot_bytes / std::max(1, size_ - 1) / 64 * 64;
    return std::max<int64_t>(part / bytes, 1);
}

bool Channel::all_gather(const ds_shm_operation &operation) {
    const int64_t total = operation.call.count, piece = geometry_.slot_bytes;
    char *output = static_cast<char *>(operation.output);
    const char *input = static_cast<const char *>(operation.input);
    char *own = output + rank_ * total;
    const auto length = [&](int64_t n) { return size_t(std::min(piece, total - n * piece)); };
    return rounds(
        (total + piece - 1) / piece,
        [&](int64_t n, char *slot) {
            std::memcpy(slot, input + n * piece, length(n));
            if (own != input) std::memcpy(own + n * piece, input + n * piece, length(n));
        },
        [&](int64_t n) {
            for (int32_t step = 1; step < size_; ++step) {
                const int32_t peer = (rank_ + step) % size_;
                const char *slot = slot_of(peer);
                if (slot == nullptr) return false;
                std::memcpy(output + peer * total + n * piece, slot, length(n));
            }
            return true;
        });
}

namespace {

// A flat tensor of `numel` elements cut evenly over the ranks (the last shares shorter or empty), and each share into
// pieces.
struct Shares {
    int64_t numel, share, piece, item;

    int64_t rounds() const { return (share + piece - 1) / piece; }
    int64_t begin(int32_t rank, int64_t n) const { return std::min(rank * share + n * piece, numel); }
    int64_t count(int32_t rank, int64_t n) const {
        const int64_t end = std::min({rank * share + (n + 1) * piece, (rank + 1) * share, numel});
        return std::max<int64_t>(end - begin(rank, n), 0);
    }
    size_t bytes(int32_t rank, int64_t n) const { return size_t(count(rank, n) * item); }
};

// Where rank `reader` finds its piece in the slot of `writer`, counted in pieces: the writer keeps none for itself.
int64_t place(int32_t writer, int32_t reader) { return reader < writer ? reader : reader - 1; }

}  // namespace

bool Channel::reduce_scatter(const ds_shm_operation &operation) {
    const int64_t item = item_bytes(operation.call.input_dtype), out_item = item_bytes(operation.call.output_dtype);
    const Shares shares{operation.call.count * size_, operation.call.count, piece_numel(item), item};
    const int64_t stride = shares.piece * item;
    const char *input = static_cast<const char *>(operation.input);
    char *output = static_cast<char *>(operation.output);
    std::vector<const void *> summands(size_t(size_), nullptr);
    return rounds(
        shares.rounds(),
        [&](int64_t n, char *slot) {
            for (int32_t peer = 0; peer < size_; ++peer)
                if (peer != rank_)
                    std::memcpy(slot + place(rank_, peer) * stride, input + shares.begin(peer, n) * item,
                                shares.bytes(peer, n));
        },
        [&](int64_t n) {
            for (int32_t peer = 0; peer < size_; ++peer) {
                if (peer == rank_) {
                    summands[size_t(peer)] = input + shares.begin(peer, n) * item;
                    continue;
                }
                const char *slot = slot_of(peer);
                if (slot == nullptr) return false;
                summands[size_t(peer)] = slot + place(peer, rank_) * stride;
            }
            combine(operation, output + n * shares.piece * out_item, summands.data(), shares.count(rank_, n));
            return true;
        });
}

// Reduces pieces of the own share (rounds R) and hands them out (rounds A), interleaved as R0 R1 A0 R2 A1 ... so that
// reducing piece n + 1 overlaps with handing out piece n.
bool Channel::all_reduce(const ds_shm_operation &operation) {
    const int64_t item = item_bytes(operation.call.input_dtype);
    if (operation.call.count * item <= std::min(kSmallReduceBytes, geometry_.slot_bytes)) return all_reduce_small(operation);
    const Shares shares{operation.call.count, (operation.call.count + size_ - 1) / size_, piece_numel(item), item};
    const int64_t stride = shares.piece * item, pieces = shares.rounds();
    char *data = static_cast<char *>(operation.output);
    std::vector<const void *> summands(size_t(size_), nullptr);
    const auto hands_out = [&](int64_t n) { return n == 2 * pieces - 1 || (n > 0 && n % 2 == 0); };
    const auto piece_of = [&](int64_t n) {
        if (n == 2 * pieces - 1) return pieces - 1;
        return hands_out(n) ? n / 2 - 1 : (n + 1) / 2;
    };
    const auto reduce_piece = [&](int64_t n) {
        for (int32_t peer = 0; peer < size_; ++peer) {
            if (peer == rank_) {
                summands[size_t(peer)] = data + shares.begin(peer, n) * item;
                continue;
            }
            const char *slot = slot_of(peer);
            if (slot == nullptr) return false;
            summands[size_t(peer)] = slot + place(peer, rank_) * stride;
        }
        combine(operation, data + shares.begin(rank_, n) * item, summands.data(), shares.count(rank_, n));
        return true;
    };
    const auto take_pieces = [&](int64_t n) {
        for (int32_t step = 1; step < size_; ++step) {
            const int32_t peer = (rank_ + step) % size_;
            const char *slot = slot_of(peer);
            if (slot == nullptr) return false;
            std::memcpy(data + shares.begin(peer, n) * item, slot, shares.bytes(peer, n));
        }
        return true;
    };
    return rounds(
        2 * pieces,
        // A piece is handed out once it has been reduced: after round 2 * piece - 1, the first one after round 0.
        [&](int64_t n) { return hands_out(n) ? std::max<int64_t>(2 * piece_of(n), 1) : 0; },
        [&](int64_t n, char *slot) {
            const int64_t piece = piece_of(n);
            if (hands_out(n)) {
                std::memcpy(slot, data + shares.begin(rank_, piece) * item, shares.bytes(rank_, piece));
                return;
            }
            for (int32_t peer = 0; peer < size_; ++peer)
                if (peer != rank_)
                    std::memcpy(slot + place(rank_, peer) * stride, data + shares.begin(peer, piece) * item,
                                shares.bytes(peer, piece));
        },
        [&](int64_t n) { return hands_out(n) ? take_pieces(piece_of(n)) : reduce_piece(piece_of(n)); });
}

bool Channel::all_reduce_small(const ds_shm_operation &operation) {
    const size_t bytes = size_t(operation.call.count * item_bytes(operation.call.input_dtype));
    std::vector<const void *> summands(size_t(size_), nullptr);
    return rounds(
        1, [&](int64_t, char *slot) { std::memcpy(slot, operation.input, bytes); },
        [&](int64_t) {
            for (int32_t peer = 0; peer < size_; ++peer) {
                const char *slot = peer == rank_ ? static_cast<const char *>(operation.input) : slot_of(peer);
                if (slot == nullptr) return false;
                summands[size_t(peer)] = slot;
            }
            combine(operation, operation.output, summands.data(), operation.call.count);
            return true;
        });
}

bool Channel::broadcast(const ds_shm_operation &operation) {
    const int64_t total = operation.call.count, piece = geometry_.slot_bytes;
    char *data = static_cast<char *>(operation.output);
    const auto length = [&](int64_t n) { return size_t(std::min(piece, total - n * piece)); };
    return rounds(
        (total + piece - 1) / piece,
        [&](int64_t n, char *slot) {
            if (rank_ == operation.call.root) std::memcpy(slot, data + n * piece, length(n));
        },
        [&](int64_t n) {
            if (rank_ == operation.call.root) return true;
            const char *slot = slot_of(operation.call.root);
            if (slot == nullptr) return false;
            std::memcpy(data + n * piece, slot, length(n));
            return true;
        });
}

// Everyone says how much it sends to whom: whether that is what the receiver expects, and how many rounds it takes
// (`most`: bytes of the longest run).
bool Channel::exchange_counts(const ds_shm_operation &operation, int64_t &most) {
    const auto ranks = size_t(size_);
    std::vector<int64_t> theirs(ranks);
    most = 0;
    return rounds(
        1, [&](int64_t, char *slot) { std::memcpy(slot, operation.input_bytes, ranks * sizeof(int64_t)); },
        [&](int64_t) {
            for (int32_t peer = 0; peer < size_; ++peer) {
                const void *counts = peer == rank_ ? operation.input_bytes : static_cast<const void *>(slot_of(peer));
                if (counts == nullptr) return false;
                std::memcpy(theirs.data(), counts, ranks * sizeof(int64_t));
                if (theirs[size_t(rank_)] != operation.output_bytes[peer]) return mismatch(peer, call_);
                theirs[size_t(peer)] = 0;  // does not travel
                most = std::max(most, *std::max_element(theirs.begin(), theirs.end()));
            }
            return true;
        });
}

bool Channel::all_to_all(const ds_shm_operation &operation) {
    const char *input = static_cast<const char *>(operation.input);
    char *output = static_cast<char *>(operation.output);
    const int64_t piece = piece_numel(1);
    const auto ranks = size_t(size_);
    std::vector<int64_t> from(ranks), to(ranks);  // where the run for or of each rank begins
    int64_t most, sent = 0, received = 0;
    for (int32_t peer = 0; peer < size_; ++peer) {
        from[size_t(peer)] = sent;
        to[size_t(peer)] = received;
        sent += operation.input_bytes[peer];
        received += operation.output_bytes[peer];
    }
    if (!exchange_counts(operation, most)) return false;
    std::memcpy(output + to[size_t(rank_)], input + from[size_t(rank_)], size_t(operation.input_bytes[rank_]));
    const auto length = [&](int64_t run, int64_t n) { return size_t(std::clamp<int64_t>(run - n * piece, 0, piece)); };
    return rounds(
        (most + piece - 1) / piece,
        [&](int64_t n, char *slot) {
            for (int32_t peer = 0; peer < size_; ++peer)
                if (const size_t bytes = peer == rank_ ? 0 : length(operation.input_bytes[peer], n); bytes > 0)
                    std::memcpy(slot + place(rank_, peer) * piece, input + from[size_t(peer)] + n * piece, bytes);
        },
        [&](int64_t n) {
            for (int32_t step = 1; step < size_; ++step) {
                const int32_t peer = (rank_ + step) % size_;
                const size_t bytes = length(operation.output_bytes[peer], n);
                if (bytes == 0) continue;
                const char *slot = slot_of(peer);
                if (slot == nullptr) return false;
                std::memcpy(output + to[size_t(peer)] + n * piece, slot + place(peer, rank_) * piece, bytes);
            }
            return true;
        });
}

bool Channel::reduce(const ds_shm_operation &operation) {
    const int64_t item = item_bytes(operation.call.input_dtype), piece = geometry_.slot_bytes / item;
    const char *input = static_cast<const char *>(operation.input);
    char *output = static_cast<char *>(operation.output);
    std::vector<const void *> summands(size_t(size_), nullptr);
    const auto numel = [&](int64_t n) { return std::min(piece, operation.call.count - n * piece); };
    return rounds(
        (operation.call.count + piece - 1) / piece,
        [&](int64_t n, char *slot) {
            if (rank_ != operation.call.root) std::memcpy(slot, input + n * piece * item, size_t(numel(n) * item));
        },
        [&](int64_t n) {
            if (rank_ != operation.call.root) return true;
            for (int32_t peer = 0; peer < size_; ++peer) {
                const char *slot = peer == rank_ ? input + n * piece * item : slot_of(peer);
                if (slot == nullptr) return false;
                summands[size_t(peer)] = slot;
            }
            combine(operation, output + n * piece * item, summands.data(), numel(n));
            return true;
        });
}

bool Channel::barrier() {
    return rounds(
        1, [](int64_t, char *) {},
        [&](int64_t) {
            for (int32_t peer = 0; peer < size_; ++peer)
                if (peer != rank_ && slot_of(peer) == nullptr) return false;
            return true;
        });
}

}  // namespace ds::shm

#endif
