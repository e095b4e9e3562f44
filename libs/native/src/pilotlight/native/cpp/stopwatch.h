#pragma once

#include <chrono>
#include <cstdint>

namespace pilotlight {

// What restoring takes, by part: images with their kernels, nodes, instantiation, upload.
enum Part { IMAGES, NODES, INSTANTIATE, UPLOAD, NUM_PARTS };

// Adds the time until it ends to `*spent`, in nanoseconds.
class Stopwatch {
  public:
    explicit Stopwatch(std::uint64_t *spent) : spent_(spent), began_(std::chrono::steady_clock::now()) {}
    Stopwatch(const Stopwatch &) = delete;
    Stopwatch &operator=(const Stopwatch &) = delete;
    ~Stopwatch() { *spent_ += std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - began_).count(); }

  private:
    std::uint64_t *const spent_;
    const std::chrono::steady_clock::time_point began_;
};

}  // namespace pilotlight
