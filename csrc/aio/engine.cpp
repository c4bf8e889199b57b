// The engine: operations in order of arrival, and workers that take blocks from the first one that has some left.
#include "aio.h"

#if defined(__linux__)

#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <sys/mman.h>
#include <system_error>
#include <thread>
#include <unistd.h>
#include <vector>

#include "buffers.h"
#include "operation.h"
#include "transport.h"

using namespace ds::aio;

namespace {

// [Note: memory that is not aligned] Tensors of torch begin 64 bytes behind a page, and disks want 512 or more: their
// bytes pass through aligned buffers. The copy stays hidden if it is made in pieces that are still in the cache when the
// other side takes them; not in smaller ones than that needs, for each costs a request, and in a new file the journal an
// entry when it is complete (writing 1 GiB: 512 KiB were 0.8 times as fast). Few buffers stay in the cache, many keep the
// disk of a busy machine at work while the worker sleeps (32 MiB were 0.88 times as fast as 16 or 8).
constexpr int64_t kBufferBytes = int64_t(16) << 20;  // aligned buffers of one worker, at most
constexpr int64_t kPieceBytes = int64_t(1) << 20;   // what passes through one of them at once
constexpr int64_t kHugeBudget = int64_t(2) << 20;    // bytes under way from which on buffers are cut from huge pages
constexpr int kThreadsPerQueue = 8;                  // without asynchronous requests: threads in the place of a queue
constexpr int kMaxDepth = 4096;

// A place in a worker's queue: the request under way in it and, where memory has to be aligned for it, the buffer.
struct Slot {
    Request request = {};
    Operation *operation = nullptr;
    Block block = {};
    char *buffer = nullptr;
    int64_t charge = 0;  // bytes that it counts for: pieces their own, anything else a whole request
};

// How many blocks of the operation at the head of the queue a worker has under way.
struct Share {
    const Operation *operation = nullptr;
    int64_t blocks = 0;
};

}  // namespace

struct ds_aio_engine {
    int64_t block_size, page;
    int depth, parallelism;
    bool single_submit, overlap;

    std::mutex mutex;
    std::condition_variable work, finished;
    std::deque<Operation *> queue;                           // those with blocks that nobody has taken
    std::map<int64_t, std::unique_ptr<Operation>> operations;  // until they are asked for
    int64_t tickets = 0;
    bool closing = false;
    std::vector<std::thread> threads;

    bool take(Slot &slot, Share &share, bool may_sleep);
    void complete(Slot &slot, int error, int64_t offset);
    void stop();
};

namespace {

// One thread with a queue of its own in the kernel.
class Worker {
  public:
    Worker(ds_aio_engine &engine, std::unique_ptr<Transport> transport)
        : engine_(engine), transport_(std::move(transport)), slots_(size_t(slot_count(engine))),
          complete_(slots_.size()), buffers_(piece_size(engine), budget(engine) >= kHugeBudget) {
        for (auto &slot : slots_) idle_.push_back(&slot);
    }

    // Slots are for whole requests or for pieces of them; so many bytes are under way at most.
    static int slot_count(const ds_aio_engine &engine) {
        return std::max(engine.depth, int(std::min(kBufferBytes, budget(engine)) / piece_size(engine)));
    }

    static int64_t piece_size(const ds_aio_engine &engine) { return std::min(engine.block_size, kPieceBytes); }

    void run() {
        for (;;) {
            if (may_refill() && !refill()) return;
            if (under_way_ > 0) reap();
        }
    }

  private:
    static int64_t budget(const ds_aio_engine &engine) { return engine.depth * engine.block_size; }

    bool may_refill() const { return engine_.overlap || bytes_under_way_ <= budget(engine_) / 2; }

    bool has_room() const {
        return !idle_.empty() && bytes_under_way_ < budget(engine_) && buffer_bytes_ < kBufferBytes;
    }

    // False when the engine closes and nothing is left.
    bool refill() {
        while (has_room()) {
            Slot &slot = *idle_.back();
            if (!engine_.take(slot, share_, under_way_ == 0)) break;
            idle_.pop_back();
            ++under_way_;
            slot.charge = slot.operation->staged() ? slot.block.end - slot.block.begin : engine_.block_size;
            bytes_under_way_ += slot.charge;
            prepare(slot);
            batch_.push_back(&slot.request);
            if (engine_.single_submit || slot.buffer) submit_batch();  // the disk works while the next block is copied
        }
        submit_batch();
        return under_way_ > 0;
    }

    void submit_batch() {
        if (!batch_.empty()) transport_->submit(batch_.data(), int(batch_.size()));
        batch_.clear();
    }

    // Fills the request in.
    void prepare(Slot &slot) {
        const Block &block = slot.block;
        const File &file = slot.operation->file();
        slot.request = {block.memory, block.end - block.begin, block.begin, 0,
                        block.direct ? file.direct_fd() : file.buffered_fd(), slot.operation->write()};
        if (!block.direct || is_aligned(slot.request, file)) return;
        if (!give_buffer(slot)) {  // no memory: through the page cache, which needs no alignment
            slot.request.fd = file.buffered_fd();
            return;
        }
        const int64_t begin = round_down(block.begin, file.alignment());
        slot.request.memory = slot.buffer;
        slot.request.offset = begin;
        slot.request.bytes = round_up(block.end, file.alignment()) - begin;
        if (slot.operation->write()) std::memcpy(slot.buffer, block.memory, size_t(block.end - block.begin));
    }

    static bool is_aligned(const Request &request, const File &file) {
        return reinterpret_cast<uintptr_t>(request.memory) % uintptr_t(file.memory_alignment()) == 0 &&
               request.offset % file.alignment() == 0 && request.bytes % file.alignment() == 0;
    }

    bool give_buffer(Slot &slot) {
        slot.buffer = buffers_.take();
        if (slot.buffer) buffer_bytes_ += slot.charge;
        return slot.buffer != nullptr;
    }

    void release(Slot &slot) {
        if (slot.operation == share_.operation) --share_.blocks;
        slot.operation = nullptr;
        idle_.push_back(&slot);
        --under_way_;
        bytes_under_way_ -= slot.charge;
        if (!slot.buffer) return;
        buffers_.give(slot.buffer);
        slot.buffer = nullptr;
        buffer_bytes_ -= slot.charge;
    }

    void reap() {
        const int count = transport_->wait(complete_.data(), int(complete_.size()));
        for (int i = 0; i < count; ++i) {
            Slot &slot = *reinterpret_cast<Slot *>(complete_[size_t(i)]);
            int64_t offset = slot.block.begin;
            const int error = finish(slot, offset);
            engine_.complete(slot, error, offset);
            release(slot);
        }
        if (count < 0) fail_all(-count);
    }

    // The queue itself is broken: nothing under way can be waited for.
    void fail_all(int error) {
        for (auto &slot : slots_) {
            if (!slot.operation) continue;
            engine_.complete(slot, error, slot.block.begin);
            release(slot);
        }
    }

    // Brings what was read to its place. What the kernel left out, or refuses to do directly, is done here.
    int finish(Slot &slot, int64_t &offset) {
        const Block &block = slot.block;
        const Request &request = slot.request;
        int64_t moved = request.result;
        if (moved == -EINVAL || moved == -EAGAIN || moved == -EOPNOTSUPP || moved == -EINTR) moved = 0;
        if (moved < 0) return int(-moved);
        const int64_t end = std::min(block.end, request.offset + moved);
        const int64_t got = std::max<int64_t>(end - block.begin, 0);
        if (!request.write && request.memory != block.memory) {
            const char *from = static_cast<char *>(request.memory) + (block.begin - request.offset);
            std::memcpy(block.memory, from, size_t(got));
        }
        if (block.begin + got == block.end) return 0;
        offset = block.begin + got;
        const int64_t left = block.end - offset;
        const int fd = slot.operation->file().buffered_fd();
        const int64_t rest = move_bytes(fd, request.write, block.memory + got, left, offset);
        if (rest < 0) return int(-rest);
        offset += rest;
        return rest == left ? 0 : request.write ? EIO : ENODATA;
    }

    ds_aio_engine &engine_;
    std::unique_ptr<Transport> transport_;
    std::vector<Slot> slots_;
    std::vector<Slot *> idle_;
    std::vector<Request *> batch_, complete_;
    Buffers buffers_;
    Share share_;
    int under_way_ = 0;
    int64_t bytes_under_way_ = 0, buffer_bytes_ = 0;  // as charged
};

static_assert(offsetof(Slot, request) == 0, "a completed request is found back as its slot");

// Signals are for the threads of the program.
void block_signals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, nullptr);
}

void start_workers(ds_aio_engine &engine, int &kind) {
    auto transport = make_transport(kind, Worker::slot_count(engine));
    if (kind == DS_AIO_THREADS) {
        engine.parallelism *= std::min(engine.depth, kThreadsPerQueue);
        engine.depth = 1;
    }
    for (int i = 0; i < engine.parallelism; ++i) {
        if (!transport) transport = make_transport(kind, Worker::slot_count(engine));
        auto worker = std::make_shared<Worker>(engine, std::move(transport));
        engine.threads.emplace_back([worker] {
            block_signals();
            worker->run();
        });
    }
}

}  // namespace

// The next block for `slot`. With `may_sleep` waits for one; then false means that the engine closes.
bool ds_aio_engine::take(Slot &slot, Share &share, bool may_sleep) {
    std::unique_lock<std::mutex> lock(mutex);
    if (may_sleep) work.wait(lock, [&] { return closing || !queue.empty(); });
    if (queue.empty()) return false;
    Operation &operation = *queue.front();
    // Workers share an operation evenly, also one of few blocks.
    if (share.operation != &operation) share = {&operation, 0};
    if (share.blocks > 0 && share.blocks >= (operation.blocks() + parallelism - 1) / parallelism) return false;
    ++share.blocks;
    slot.operation = &operation;
    slot.block = operation.take();
    if (operation.exhausted()) queue.pop_front();
    return true;
}

void ds_aio_engine::complete(Slot &slot, int error, int64_t offset) {
    std::lock_guard<std::mutex> lock(mutex);
    Operation &operation = *slot.operation;
    operation.complete(error, offset);
    if (error) std::erase(queue, &operation);
    if (operation.done()) finished.notify_all();
}

void ds_aio_engine::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        closing = true;
    }
    work.notify_all();
    for (auto &thread : threads) thread.join();
}

ds_aio_engine *ds_aio_open(const ds_aio_options *options, int32_t *status) {
    std::unique_ptr<ds_aio_engine> engine;
    try {
        engine = std::make_unique<ds_aio_engine>();
        engine->page = std::max<int64_t>(sysconf(_SC_PAGESIZE), 4096);
        engine->block_size = round_up(std::min<int64_t>(options->block_size, int64_t(1) << 30), engine->page);
        engine->depth = std::clamp(options->queue_depth, 1, kMaxDepth);
        engine->parallelism = std::max(options->parallelism, 1);
        engine->single_submit = options->single_submit != 0;
        engine->overlap = options->overlap_events != 0;
        int kind = options->transport;
        start_workers(*engine, kind);
        *status = kind;
        return engine.release();
    } catch (const std::system_error &error) {
        *status = -error.code().value();
    } catch (const std::bad_alloc &) {
        *status = -ENOMEM;
    }
    if (engine) engine->stop();
    return nullptr;
}

void ds_aio_close(ds_aio_engine *engine) {
    engine->stop();
    delete engine;
}

int64_t ds_aio_start(ds_aio_engine *engine, int32_t write, void *data, int64_t bytes, const char *path,
                     int64_t file_offset) try {
    auto operation = std::make_unique<Operation>(write != 0, data, bytes, file_offset);
    const int64_t piece = Worker::piece_size(*engine);
    if (const int error = operation->open(path, engine->page, engine->block_size, piece)) return -error;
    std::lock_guard<std::mutex> lock(engine->mutex);
    const int64_t ticket = engine->tickets++;
    if (!operation->done()) {
        engine->queue.push_back(operation.get());
        engine->work.notify_all();
    }
    engine->operations.emplace(ticket, std::move(operation));
    return ticket;
} catch (const std::bad_alloc &) {
    return -ENOMEM;
}

int32_t ds_aio_finish(ds_aio_engine *engine, int64_t ticket, int64_t *offset) {
    std::unique_ptr<Operation> operation;
    {
        std::unique_lock<std::mutex> lock(engine->mutex);
        const auto found = engine->operations.find(ticket);
        if (found == engine->operations.end()) return EINVAL;
        operation = std::move(found->second);
        engine->operations.erase(found);
        engine->finished.wait(lock, [&] { return operation->done(); });
    }
    *offset = operation->error_offset();
    return operation->error();
}

#endif
