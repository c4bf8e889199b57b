// One read or write, and how it is cut into blocks.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "file.h"
#include "transport.h"

namespace ds::aio {

constexpr int64_t round_down(int64_t value, int64_t step) { return value - value % step; }
constexpr int64_t round_up(int64_t value, int64_t step) { return round_down(value + step - 1, step); }

// A run of bytes of the file, [begin, end), and the caller's memory for it.
struct Block {
    char *memory;
    int64_t begin, end;
    bool direct;
};

// [Note: direct and buffered parts]
// Direct access takes whole aligned blocks. What is left of a write at either end goes through the page cache; the cut is
// at pages, so that no page is written both ways: a cached page that overlapped a direct write could later be written
// back over it. Reads are direct throughout: around their ends more is read than wanted, into an aligned buffer.
class Operation {
  public:
    Operation(bool write, void *memory, int64_t bytes, int64_t offset)
        : write_(write), memory_(static_cast<char *>(memory)), begin_(offset), end_(offset + bytes), next_(offset) {}

    // Opens the file and makes sure that it holds, or can take, the range. Blocks are of `block` bytes, or of `piece`
    // where they have to pass through aligned buffers. 0, or an errno.
    int open(const char *path, int64_t page, int64_t block, int64_t piece) {
        if (const int error = file_.open(path, write_)) return error;
        block_ = block;
        middle_begin_ = middle_end_ = end_;
        if (file_.direct_fd() >= 0) {
            const int64_t step = write_ ? std::max(page, file_.alignment()) : file_.alignment();
            middle_begin_ = std::min(round_up(begin_, step), end_);
            middle_end_ = std::max(round_down(end_, step), middle_begin_);
            const auto shift = reinterpret_cast<uintptr_t>(memory_) - uintptr_t(begin_);
            staged_ = middle_begin_ < middle_end_ && shift % uintptr_t(file_.memory_alignment()) != 0;
            if (staged_) block_ = piece;
        }
        if (write_) return file_.reserve(begin_, end_);
        const int64_t size = file_.size();
        return size < 0 ? int(-size) : size < end_ ? ENODATA : 0;
    }

    bool exhausted() const { return next_ >= end_ || error_ != 0; }

    Block take() {
        const bool middle = next_ >= middle_begin_ && next_ < middle_end_;
        const int64_t limit = next_ < middle_begin_ ? middle_begin_ : middle ? middle_end_ : end_;
        const int64_t begin = next_;
        next_ = std::min(limit, round_down(begin, file_.alignment()) + block_);
        ++under_way_;
        return {memory_ + (begin - begin_), begin, next_, middle || (!write_ && file_.direct_fd() >= 0)};
    }

    void complete(int error, int64_t offset) {
        --under_way_;
        if (error && !error_) {
            error_ = error;
            error_offset_ = offset;
        }
    }

    bool done() const { return exhausted() && under_way_ == 0; }
    int64_t blocks() const { return (end_ - begin_ + block_ - 1) / block_; }
    // Whether its memory is not aligned: every byte is copied by a worker.
    bool staged() const { return staged_; }
    bool write() const { return write_; }
    const File &file() const { return file_; }
    int error() const { return error_; }
    int64_t error_offset() const { return error_ ? error_offset_ : begin_; }

  private:
    const bool write_;
    char *const memory_;
    const int64_t begin_, end_;
    int64_t next_;  // file offset of the first byte that no worker has taken
    int64_t middle_begin_ = 0, middle_end_ = 0;  // whole aligned blocks
    int64_t block_ = 1;
    bool staged_ = false;
    int64_t under_way_ = 0;
    int error_ = 0;
    int64_t error_offset_ = 0;
    File file_;
};

}  // namespace ds::aio
