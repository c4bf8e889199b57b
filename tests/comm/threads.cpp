// Ranks as threads, for ThreadSanitizer (test_thread_sanitizer.py): all on one mapping, so that it sees both sides of
// every access.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <vector>
#include <unistd.h>

#include "channel.h"

using namespace ds::shm;

static void check(bool right, const char *what) {
    if (!right) {
        std::fprintf(stderr, "wrong: %s\n", what);
        std::_Exit(1);
    }
}

static ds_shm_operation sum_of(std::vector<float> &data) {
    return {data.data(), data.data(), nullptr, nullptr, 1.0, {int64_t(data.size()), DS_SHM_ALL_REDUCE, 0, 0, 0}};
}

static void one_rank(Channel *channel, int rank, int size, int steps) {
    std::mt19937 plan(7);
    for (int step = 0; step < steps; ++step) {
        const int kind = int(plan() % 7), numel = 1 + int(plan() % (step % 10 == 0 ? 400000 : 3000)), root = int(plan() % unsigned(size));
        if (plan() % 16 == 0 && int(plan() % unsigned(size)) == rank) usleep(300);
        std::vector<float> whole(size_t(numel) * size, float(rank + 1)), part(size_t(numel), float(rank + 1));
        const float total = float(size * (size + 1) / 2);
        if (kind == 0) {
            const ds_shm_operation op = sum_of(part);
            check(channel->run(op, rank == 1) == DS_SHM_OK, "all_reduce");
            check(part.front() == total && part.back() == total, "sum");
        } else if (kind == 1) {
            const ds_shm_operation op{part.data(), whole.data(), nullptr, nullptr, 1.0, {numel, DS_SHM_REDUCE_SCATTER, 0, 0, 0}};
            check(channel->run(op, false) == DS_SHM_OK && part.back() == total, "reduce_scatter");
        } else if (kind == 2) {
            const ds_shm_operation op{whole.data(), part.data(), nullptr, nullptr, 1.0, {numel * 4, DS_SHM_ALL_GATHER, 0, 0, 0}};
            check(channel->run(op, false) == DS_SHM_OK && whole.back() == float(size) && whole.front() == 1, "all_gather");
        } else if (kind == 3) {
            const ds_shm_operation op{part.data(), nullptr, nullptr, nullptr, 1.0, {numel * 4, DS_SHM_BROADCAST, 0, 0, root}};
            check(channel->run(op, false) == DS_SHM_OK && part.back() == float(root + 1), "broadcast");
        } else if (kind == 4) {
            const ds_shm_operation op{part.data(), part.data(), nullptr, nullptr, 1.0, {numel, DS_SHM_REDUCE, 0, 0, root}};
            check(channel->run(op, false) == DS_SHM_OK && part.back() == (rank == root ? total : rank + 1), "reduce");
        } else if (kind == 5) {
            std::vector<int64_t> counts(size_t(size), numel * 4);
            std::vector<float> output(whole.size());
            const ds_shm_operation op{output.data(), whole.data(), counts.data(), counts.data(), 1.0, {0, DS_SHM_ALL_TO_ALL, 0, 0, 0}};
            check(channel->run(op, false) == DS_SHM_OK && output.back() == float(size), "all_to_all");
        } else {
            const ds_shm_operation op{nullptr, nullptr, nullptr, nullptr, 1.0, {0, DS_SHM_BARRIER, 0, 0, 0}};
            check(channel->run(op, false) == DS_SHM_OK, "barrier");
        }
    }
}

static void rounds_of(int size, int steps) {
    const int fd = ds_shm_create(size, 5);
    const Geometry geometry(size);
    void *base = mmap(nullptr, size_t(geometry.segment_bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    std::vector<Channel *> channels;  // never destroyed: each would unmap the segment
    for (int rank = 0; rank < size; ++rank) channels.push_back(new Channel(base, rank, size));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
        channels[size_t(rank)]->start(20000, 60000);
        threads.emplace_back(one_rank, channels[size_t(rank)], rank, size, steps);
    }
    for (auto &thread : threads) thread.join();
}

// The queue of a channel: issued, run by whoever comes first, waited for by two threads, closed in the middle.
static void queue_of(int size, int steps) {
    const int fd = ds_shm_create(size, 6);
    const std::string path = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(fd);
    std::vector<ds_shm_channel *> channels;
    for (int rank = 0; rank < size; ++rank) channels.push_back(ds_shm_attach(path.c_str(), 6, rank, size));
    for (auto *channel : channels) ds_shm_start(channel, 20, 60000);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank)
        threads.emplace_back([&, rank] {
            auto *channel = channels[size_t(rank)];
            std::mt19937 own{unsigned(rank)};
            for (int step = 0; step < steps; ++step) {
                std::vector<std::vector<float>> data(5, std::vector<float>(size_t(1 + step * 13 % 5000), 1));
                std::vector<int64_t> tickets;
                for (auto &one : data) {
                    const ds_shm_operation op = sum_of(one);
                    tickets.push_back(ds_shm_issue(channel, &op));
                }
                if (own() % 4 == 0) usleep(own() % 1500);
                std::thread other([&] { check(ds_shm_wait(channel, tickets[1]) == DS_SHM_OK, "wait"); });
                check(ds_shm_wait(channel, tickets[4]) == DS_SHM_OK, "wait");
                check(ds_shm_completed(channel) >= tickets[4], "completed");
                other.join();
                for (auto &one : data) check(one.back() == float(size), "queued sum");
            }
        });
    for (auto &thread : threads) thread.join();
    // Rank 0 waits for what the others never join; another thread closes its channel.
    std::vector<float> data(100, 1);
    const ds_shm_operation op = sum_of(data);
    const int64_t ticket = ds_shm_issue(channels[0], &op);
    std::thread waiting([&] { check(ds_shm_wait(channels[0], ticket) == DS_SHM_CLOSED, "closed"); });
    usleep(20000);
    ds_shm_close(channels[0]);
    waiting.join();
    for (int rank = 1; rank < size; ++rank) ds_shm_close(channels[size_t(rank)]);
    close(fd);
}

int main(int, char **arguments) {
    const int steps = std::atoi(arguments[1]);
    for (int size : {2, 3}) {
        rounds_of(size, steps);
        queue_of(size, steps / 4);
    }
    std::puts("right");
}
