#include "file.h"

#if defined(__linux__)

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "aio.h"

namespace ds::aio {
namespace {

constexpr int64_t kUnknownAlignment = 4096;  // where the kernel does not tell (before 6.1): holds for all disks of today
constexpr unsigned kDioAlign = 0x2000;       // STATX_DIOALIGN, missing in older headers

// The head of `struct statx` up to the fields that came with Linux 6.1 (uapi/linux/stat.h).
struct StatxWithAlignment {
    uint32_t mask, other[37];
    uint32_t dio_mem_align, dio_offset_align;
    uint32_t spare[24];
};
static_assert(sizeof(StatxWithAlignment) == 256);
static_assert(offsetof(StatxWithAlignment, dio_mem_align) == 152);

struct Alignment {
    int64_t memory, offset;  // 0: no direct access
};

Alignment alignment_of(int fd) {
    StatxWithAlignment answer = {};
    const long failed = syscall(SYS_statx, fd, "", AT_EMPTY_PATH, kDioAlign, &answer);
    if (failed || !(answer.mask & kDioAlign)) return {kUnknownAlignment, kUnknownAlignment};
    return {answer.dio_mem_align, answer.dio_offset_align};
}

int open_again(const char *path, int flags) {
    int fd;
    do fd = ::open(path, flags | O_CLOEXEC, 0666);
    while (fd < 0 && errno == EINTR);
    return fd;
}

}  // namespace

File::~File() {
    if (direct_ >= 0) ::close(direct_);
    if (buffered_ >= 0) ::close(buffered_);
}

int File::open(const char *path, bool write) {
    buffered_ = open_again(path, write ? O_WRONLY | O_CREAT : O_RDONLY);
    if (buffered_ < 0) return errno;
    struct stat status;
    if (fstat(buffered_, &status)) return errno;
    if (S_ISDIR(status.st_mode)) return EISDIR;
    if (!S_ISREG(status.st_mode)) return 0;
    direct_ = open_again(path, (write ? O_WRONLY : O_RDONLY) | O_DIRECT);
    if (direct_ < 0) return 0;  // EINVAL on file systems without; anything else shows with the first request
    const auto [memory, offset] = alignment_of(direct_);
    if (memory > 0 && offset > 0) {
        memory_alignment_ = memory;
        alignment_ = offset;
    } else {
        ::close(direct_);
        direct_ = -1;
    }
    return 0;
}

int64_t File::size() const {
    struct stat status;
    return fstat(buffered_, &status) ? -errno : int64_t(status.st_size);
}

int File::reserve(int64_t begin, int64_t end) {
    const int64_t before = size();
    if (before < 0) return int(-before);
    if (before >= end || begin >= end) return 0;
    // Holes before `begin` stay holes.
    if (fallocate(buffered_, 0, begin, end - begin) == 0) return 0;
    if (errno != ENOSPC && errno != EFBIG && errno != EDQUOT) return 0;  // not supported: the writes will tell
    const int error = errno;
    return ftruncate(buffered_, before) ? errno : error;
}

}  // namespace ds::aio

int32_t ds_aio_alignment(const char *path) {
    ds::aio::File file;
    if (const int error = file.open(path, false)) return -error;
    return file.direct_fd() < 0 ? 0 : int32_t(std::max(file.alignment(), file.memory_alignment()));
}

#endif
