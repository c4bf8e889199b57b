// The C interface: making and joining a segment, and the queue of operations of a channel.
#include "shared_memory.h"

#if defined(__linux__)

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <fcntl.h>
#include <mutex>
#include <new>
#include <sys/mman.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

#include "channel.h"

using ds::shm::Channel;
using ds::shm::Geometry;
using ds::shm::Header;
using ds::shm::RankBlock;

namespace {

constexpr uint64_t kMagic = 0x44535f53484d3031;  // "DS_SHM01"

void *map(int fd, int64_t bytes) {
    void *base = mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return base == MAP_FAILED ? nullptr : base;
}

}  // namespace

// [Note: who runs an operation] Operations run one after the other in the order of issue, in the thread that waits for
// them or in the channel's own. The first is faster: it may spin, and nothing has to wake up. So the channel's thread
// does not jump at what was issued. It looks at the queue every kPatrol for as long as operations keep coming, and takes
// over what nobody has begun to wait for: the owner computes, or waits for something else.
constexpr auto kPatrol = std::chrono::microseconds(500);
constexpr int kLastPatrol = 40;  // so many in vain, and the thread sleeps until the next operation is issued

struct ds_shm_channel {
    Channel channel;
    std::mutex mutex;
    std::condition_variable issue_or_close, finished;
    std::deque<ds_shm_operation> queue;
    int64_t issued = 0, completed = 0, first_failed = INT64_MAX;
    int32_t failure = DS_SHM_OK;
    int32_t waiting = 0;  // threads inside wait()
    bool executing = false, asleep = false, closing = false;
    std::thread thread;

    ds_shm_channel(void *base, int32_t rank, int32_t size) : channel(base, rank, size) {}

    void run_next(std::unique_lock<std::mutex> &lock, bool in_background) {
        const ds_shm_operation operation = queue.front();
        queue.pop_front();
        executing = true;
        lock.unlock();
        const int32_t status = channel.run(operation, in_background);
        lock.lock();
        executing = false;
        ++completed;
        if (status != DS_SHM_OK && failure == DS_SHM_OK) {
            failure = status;
            first_failed = completed;
        }
        finished.notify_all();
    }

    void patrol() {
        std::unique_lock lock(mutex);
        for (int in_vain = 0; !closing; ++in_vain) {
            if (in_vain == kLastPatrol) {
                asleep = true;
                issue_or_close.wait(lock, [&] { return closing || !queue.empty(); });
                asleep = false;
                in_vain = 0;
            }
            issue_or_close.wait_for(lock, kPatrol, [&] { return closing; });
            for (; !closing && !executing && !queue.empty(); in_vain = 0) run_next(lock, true);
        }
    }

    int64_t issue(std::unique_lock<std::mutex> &, const ds_shm_operation &operation) {
        if (!thread.joinable()) thread = std::thread([this] { patrol(); });
        queue.push_back(operation);
        if (asleep) issue_or_close.notify_one();
        return ++issued;
    }

    int32_t wait(std::unique_lock<std::mutex> &lock, int64_t ticket) {
        ++waiting;
        while (completed < ticket && !closing) {
            if (!executing && !queue.empty())
                run_next(lock, false);
            else
                finished.wait(lock);
        }
        --waiting;
        if (closing) finished.notify_all();
        if (completed < ticket) return DS_SHM_CLOSED;
        return ticket >= first_failed ? failure : int32_t(DS_SHM_OK);
    }
};

int32_t ds_shm_abi(void) { return DS_SHM_ABI; }

int32_t ds_shm_create(int32_t size, uint64_t token) {
    const Geometry geometry(size);
    const int fd = memfd_create("deepspeed", MFD_CLOEXEC);
    if (fd < 0) return -errno;
    void *base = nullptr;
    if (fchmod(fd, S_IRUSR | S_IWUSR) == 0 && ftruncate(fd, geometry.segment_bytes) == 0)
        base = map(fd, geometry.segment_bytes);
    if (base == nullptr) {
        const int32_t error = errno;
        close(fd);
        return -error;
    }
    auto *header = new (base) Header{kMagic, token, DS_SHM_ABI, uint32_t(size)};
    auto *blocks = reinterpret_cast<RankBlock *>(header + 1);
    for (int32_t rank = 0; rank < size; ++rank) new (blocks + rank) RankBlock;
    munmap(base, size_t(geometry.segment_bytes));
    return fd;
}

ds_shm_channel *ds_shm_attach(const char *path, uint64_t token, int32_t rank, int32_t size) {
    const Geometry geometry(size);
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return nullptr;
    struct stat found;
    void *base = nullptr;
    if (fstat(fd, &found) == 0 && found.st_size == geometry.segment_bytes) base = map(fd, geometry.segment_bytes);
    close(fd);
    if (base == nullptr) return nullptr;
    const auto *header = static_cast<const Header *>(base);
    if (header->magic != kMagic || header->token != token || header->abi != DS_SHM_ABI ||
        header->size != uint32_t(size)) {
        munmap(base, size_t(geometry.segment_bytes));
        return nullptr;
    }
    return new (std::nothrow) ds_shm_channel(base, rank, size);
}

void ds_shm_start(ds_shm_channel *channel, int32_t spin_us, int64_t timeout_ms) {
    channel->channel.start(int64_t(spin_us) * 1000, timeout_ms);
}

int64_t ds_shm_issue(ds_shm_channel *channel, const ds_shm_operation *operation) {
    std::unique_lock lock(channel->mutex);
    return channel->issue(lock, *operation);
}

int32_t ds_shm_wait(ds_shm_channel *channel, int64_t ticket) {
    std::unique_lock lock(channel->mutex);
    return channel->wait(lock, ticket);
}

int64_t ds_shm_completed(ds_shm_channel *channel) {
    std::unique_lock lock(channel->mutex);
    return channel->completed;
}

void ds_shm_explain(ds_shm_channel *channel, ds_shm_failure *failure) { channel->channel.explain(*failure); }

void ds_shm_close(ds_shm_channel *channel) {
    channel->channel.abandon();
    {
        std::unique_lock lock(channel->mutex);
        channel->closing = true;
        channel->queue.clear();
        channel->issue_or_close.notify_all();
        channel->finished.notify_all();
        channel->finished.wait(lock, [&] { return !channel->executing && channel->waiting == 0; });
    }
    if (channel->thread.joinable()) channel->thread.join();
    delete channel;
}

#else

int32_t ds_shm_abi(void) { return 0; }

#endif
