// How requests reach the kernel: io_uring, Linux AIO, or plain system calls.
#pragma once

#include <cstdint>
#include <memory>

namespace ds::aio {

// One request: `bytes` between `memory` and the file behind `fd`, from `offset` on.
struct Request {
    void *memory;
    int64_t bytes, offset;
    int64_t result;  // set when complete: bytes moved, or a negative errno
    int fd;
    bool write;
};

class Transport {
  public:
    virtual ~Transport() = default;
    // Takes all `count` requests; what the kernel refuses completes with an error.
    virtual void submit(Request *const *requests, int count) = 0;
    // Waits for at least one of the requests under way; writes up to `limit` complete ones, returns how many.
    virtual int wait(Request **complete, int limit) = 0;
};

// The one named by `kind` (enum ds_aio_transport), or the next one that works here; `kind` becomes what was taken.
std::unique_ptr<Transport> make_transport(int &kind, int depth);

// Null where the kernel lacks or forbids it.
std::unique_ptr<Transport> make_io_uring(int depth);
std::unique_ptr<Transport> make_linux_aio(int depth);

// Moves as much as goes in one thread: plain pread and pwrite, repeated after short ones. Bytes moved (short only at the
// end of the file), or a negative errno.
int64_t move_bytes(int fd, bool write, void *memory, int64_t bytes, int64_t offset);

}  // namespace ds::aio
