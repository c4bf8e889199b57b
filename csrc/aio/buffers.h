// Aligned memory that blocks pass through on their way between the disk and memory that is not aligned.
#pragma once

#include <cstdint>
#include <vector>

namespace ds::aio {

// [Note: contiguous buffers] What a request costs a (virtual) disk depends on the number of physically contiguous runs
// that its memory has: reading into 2 MiB pages was 2 to 3 times as fast as into scattered ones of 4 KiB. Buffers are cut
// from huge pages where the system has some, or makes some in a short time by moving other memory.
class Buffers {
  public:
    // Buffers of `bytes` (a multiple of the page) each; `huge`: many will be needed.
    Buffers(int64_t bytes, bool huge) : bytes_(bytes), huge_(huge) {}
    Buffers(const Buffers &) = delete;
    Buffers &operator=(const Buffers &) = delete;
    ~Buffers();

    char *take();  // null if there is no memory
    // The next one to be taken: it is in the cache.
    void give(char *buffer) { spare_.push_back(buffer); }

  private:
    bool grow();

    const int64_t bytes_;
    const bool huge_;
    int64_t patience_ns_ = 200'000'000;  // for finding huge pages
    struct Chunk {
        void *mapping;
        int64_t bytes;
    };
    std::vector<Chunk> chunks_;
    std::vector<char *> spare_;
};

}  // namespace ds::aio
