// A file that is opened twice: past the page cache, and through it.
#pragma once

#include <cstdint>

namespace ds::aio {

class File {
  public:
    File() = default;
    File(const File &) = delete;
    File &operator=(const File &) = delete;
    ~File();

    // 0, or an errno.
    int open(const char *path, bool write);

    // Makes the file reach to `end` with its blocks allocated, so that writes neither run out of space midway nor wait
    // for each other to move the end of the file. 0, or an errno; then the file has its old size.
    int reserve(int64_t begin, int64_t end);

    int64_t size() const;

    int direct_fd() const { return direct_; }      // -1: the file system has no direct access
    int buffered_fd() const { return buffered_; }
    // Of offsets and lengths, and of memory, for direct access; 1 without it.
    int64_t alignment() const { return alignment_; }
    int64_t memory_alignment() const { return memory_alignment_; }

  private:
    int direct_ = -1, buffered_ = -1;
    int64_t alignment_ = 1, memory_alignment_ = 1;
};

}  // namespace ds::aio
