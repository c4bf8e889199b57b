#include "transport.h"

#if defined(__linux__)

#include <cerrno>
#include <deque>
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

#include "aio.h"

namespace ds::aio {

int64_t move_bytes(int fd, bool write, void *memory, int64_t bytes, int64_t offset) {
    int64_t done = 0;
    while (done < bytes) {
        char *at = static_cast<char *>(memory) + done;
        const size_t left = size_t(bytes - done);
        const ssize_t moved = write ? pwrite(fd, at, left, offset + done) : pread(fd, at, left, offset + done);
        if (moved < 0 && errno == EINTR) continue;
        if (moved < 0) return -errno;
        if (moved == 0) break;
        done += moved;
    }
    return done;
}

namespace {

// Each request is done by the worker that waits for it.
class Synchronous final : public Transport {
  public:
    void submit(Request *const *requests, int count) override { waiting_.insert(waiting_.end(), requests, requests + count); }

    int wait(Request **complete, int) override {
        if (waiting_.empty()) return 0;
        Request *request = waiting_.front();
        waiting_.pop_front();
        request->result = move_bytes(request->fd, request->write, request->memory, request->bytes, request->offset);
        *complete = request;
        return 1;
    }

  private:
    std::deque<Request *> waiting_;
};

// io_submit(2) and io_getevents(2), without the library around them.
class LinuxAio final : public Transport {
  public:
    static std::unique_ptr<Transport> make(int depth) {
        auto made = std::unique_ptr<LinuxAio>(new LinuxAio(depth));
        return syscall(SYS_io_setup, depth, &made->context_) ? nullptr : std::move(made);
    }

    ~LinuxAio() override {
        if (context_) syscall(SYS_io_destroy, context_);
    }

    void submit(Request *const *requests, int count) override {
        std::vector<iocb> blocks(static_cast<size_t>(count), iocb{});
        std::vector<iocb *> pointers;
        for (int i = 0; i < count; ++i) {
            fill(blocks[size_t(i)], *requests[i]);
            pointers.push_back(&blocks[size_t(i)]);
        }
        for (int sent = 0; sent < count;) {
            const long taken = syscall(SYS_io_submit, context_, long(count - sent), pointers.data() + sent);
            if (taken > 0) {
                sent += int(taken);
            } else if (taken == 0 || (errno != EAGAIN && errno != EINTR)) {
                requests[sent]->result = taken == 0 ? -EIO : -errno;
                refused_.push_back(requests[sent++]);
            } else if (errno == EAGAIN) {
                usleep(50);  // the kernel is out of requests for now
            }
        }
    }

    int wait(Request **complete, int limit) override {
        if (!refused_.empty()) {
            *complete = refused_.front();
            refused_.pop_front();
            return 1;
        }
        events_.resize(size_t(limit));
        long count;
        do count = syscall(SYS_io_getevents, context_, 1L, long(limit), events_.data(), nullptr);
        while (count < 0 && errno == EINTR);
        for (long i = 0; i < count; ++i) {
            complete[i] = reinterpret_cast<Request *>(events_[size_t(i)].data);
            complete[i]->result = events_[size_t(i)].res;
        }
        return int(count);
    }

  private:
    explicit LinuxAio(int depth) { events_.reserve(size_t(depth)); }

    static void fill(iocb &block, const Request &request) {
        block.aio_data = reinterpret_cast<uint64_t>(&request);
        block.aio_lio_opcode = request.write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
        block.aio_fildes = uint32_t(request.fd);
        block.aio_buf = reinterpret_cast<uint64_t>(request.memory);
        block.aio_nbytes = uint64_t(request.bytes);
        block.aio_offset = request.offset;
    }

    aio_context_t context_ = 0;
    std::vector<io_event> events_;
    std::deque<Request *> refused_;
};

}  // namespace

std::unique_ptr<Transport> make_linux_aio(int depth) { return LinuxAio::make(depth); }

std::unique_ptr<Transport> make_transport(int &kind, int depth) {
    if (kind <= DS_AIO_IO_URING) {
        kind = DS_AIO_IO_URING;
        if (auto made = make_io_uring(depth)) return made;
    }
    if (kind <= DS_AIO_LIBAIO) {
        kind = DS_AIO_LIBAIO;
        if (auto made = make_linux_aio(depth)) return made;
    }
    kind = DS_AIO_THREADS;
    return std::make_unique<Synchronous>();
}

}  // namespace ds::aio

#endif
