// What a device writes into the host's memory, awaited there: to ask the driver takes as long as what it does for other threads.
#include <chrono>
#include <cstdint>

#include "driver.h"

using namespace pilotlight;

// Returns when each word is another one than `absent`, which is what the caller wrote there before, or after `patience_s`.
PILOTLIGHT_EXPORT int pilotlight_await_words(const std::int32_t *words, std::uint64_t count, std::int32_t absent, double patience_s) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(patience_s);
    std::uint64_t there = 0;
    for (std::uint32_t looks = 1;; looks++) {
        while (there < count && __atomic_load_n(words + there, __ATOMIC_ACQUIRE) != absent) there++;
        if (there == count) return OK;
        if (looks % 64 == 0 && std::chrono::steady_clock::now() >= until) return TIMED_OUT;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }
}
