// Threads that copy within the host's memory: one alone is slower than the device's bus.
#pragma once

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

namespace pilotlight {

struct HostMove {
    char *to;
    const char *from;
    std::size_t bytes;
};

class Movers {
  public:
    explicit Movers(int threads) {
        for (int index = 1; index < threads; index++) threads_.emplace_back([this, index] { help(index); });
    }

    ~Movers() {
        {
            std::lock_guard guard(lock_);
            stopping_ = true;
        }
        begun_.notify_all();
        for (auto &thread : threads_) thread.join();
    }

    // Does all of them, in this thread and the others.
    void run(const std::vector<HostMove> &moves) {
        std::size_t total = 0;
        for (auto &move : moves) total += move.bytes;
        if (threads_.empty() || total < WORTHWHILE_BYTES) {
            for (auto &move : moves) std::memcpy(move.to, move.from, move.bytes);
            return;
        }
        {
            std::lock_guard guard(lock_);
            moves_ = &moves;
            total_ = total;
            left_ = static_cast<int>(threads_.size());
            turn_++;
        }
        begun_.notify_all();
        share(moves, total, 0);
        std::unique_lock guard(lock_);
        done_.wait(guard, [this] { return left_ == 0; });
    }

  private:
    static constexpr std::size_t WORTHWHILE_BYTES = 256 << 10;

    // The bytes of all moves are cut into as many equal shares as there are threads.
    void share(const std::vector<HostMove> &moves, std::size_t total, std::size_t index) const {
        std::size_t sharers = threads_.size() + 1, at = 0;
        std::size_t first = total * index / sharers, last = total * (index + 1) / sharers;
        for (auto &move : moves) {
            std::size_t start = at < first ? first - at : 0;
            std::size_t stop = at + move.bytes > last ? (last > at ? last - at : 0) : move.bytes;
            if (start < stop) std::memcpy(move.to + start, move.from + start, stop - start);
            at += move.bytes;
        }
    }

    void help(int index) {
        std::uint64_t seen = 0;
        std::unique_lock guard(lock_);
        for (;;) {
            begun_.wait(guard, [&] { return stopping_ || turn_ != seen; });
            if (stopping_) return;
            seen = turn_;
            const auto &moves = *moves_;
            std::size_t total = total_;
            guard.unlock();
            share(moves, total, index);
            guard.lock();
            if (--left_ == 0) done_.notify_one();
        }
    }

    std::vector<std::thread> threads_;
    std::mutex lock_;
    std::condition_variable begun_, done_;
    const std::vector<HostMove> *moves_ = nullptr;
    std::size_t total_ = 0;
    std::uint64_t turn_ = 0;
    int left_ = 0;
    bool stopping_ = false;
};

}  // namespace pilotlight
