// Ranges of files read straight into memory that is mapped, and hashed there unit by unit, in the thread that asks.
//
//     memory    | unit 0 | unit 1 | ...              a unit is done when all of it is there and hashed
//     spans     | file a    |0| file b |             what no span fills becomes zero
//
// What the system has of a file in its memory goes straight to where it belongs. For what it has not the thread waits, perhaps for ever: that
// comes by way of a buffer of its own. So memory is only ever written under a lock and without waiting for a disk, and once cancel() has
// returned it is not written any more, however late the disk answers.
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include "blake3.h"
#include "driver.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace pilotlight {

namespace {

// What run() returns beside OK.
enum ReadResult : int {
    CANCELLED = 1,
    TOO_SHORT = 2,     // a file ends before its span does
    READ_FAILED = 3,   // a file; errno says how
    NO_MEMORY = 4,     // for the memory that is written to
    NOT_RESIDENT = 5,  // the system has not got the next bytes in its memory, and was to be asked for no others
};

// What is read before it is hashed: little enough for the second cache of a core.
constexpr std::uint64_t STEP_BYTES = 256 << 10;

struct Span {
    std::int64_t descriptor, file_offset;
    std::uint64_t start, stop;  // from the start of the memory
};

int populated(char *start, std::uint64_t bytes) {
    static const std::uintptr_t page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    auto first = reinterpret_cast<std::uintptr_t>(start) & ~(page - 1), last = reinterpret_cast<std::uintptr_t>(start) + bytes;
    while (madvise(reinterpret_cast<void *>(first), last - first, MADV_POPULATE_WRITE) != 0)
        if (errno != EINTR && errno != EAGAIN) return errno;
    return 0;
}

}  // namespace

class FileRead {
  public:
    FileRead(char *memory, std::uint64_t start, std::uint64_t stop, std::uint64_t unit_bytes, const std::int64_t *spans, int count,
             std::uint64_t *done)
        : memory_(memory), position_(start), stop_(stop), unit_bytes_(unit_bytes), done_(done) {
        for (int index = 0; index < count; index++, spans += 4)
            spans_.push_back({spans[0], spans[1], static_cast<std::uint64_t>(spans[2]), static_cast<std::uint64_t>(spans[3])});
    }

    int run(bool resident_only, std::uint8_t *digests, int *units, int *error) {
        while (position_ < stop_) {
            std::uint64_t size = stop_ - position_ < unit_bytes_ ? stop_ - position_ : unit_bytes_;
            if (int failed = fill_unit(position_ + size, resident_only)) {
                *error = error_;
                return failed;
            }
            std::uint8_t digest[BLAKE3_DIGEST_BYTES];
            hash_.digest(digest);
            std::lock_guard guard(lock_);
            if (cancelled_) return CANCELLED;
            std::memcpy(digests + *units * BLAKE3_DIGEST_BYTES, digest, sizeof digest);
            (*units)++;
            position_ += size;
        }
        return OK;
    }

    // From when this returns, neither memory nor results are written any more.
    void cancel() {
        std::lock_guard guard(lock_);
        cancelled_ = true;
    }

  private:
    int fill_unit(std::uint64_t stop, bool resident_only) {
        hash_.restart();
        next_ = 0;
        if ((error_ = populated(memory_ + position_, stop - position_))) return NO_MEMORY;
        std::uint64_t at = position_, hashed = position_;
        while (at < stop) {
            while (next_ < spans_.size() && spans_[next_].stop <= at) next_++;
            std::uint64_t before = at;
            if (next_ == spans_.size() || spans_[next_].start > at) {
                std::uint64_t end = next_ == spans_.size() || spans_[next_].start > stop ? stop : spans_[next_].start;
                std::lock_guard guard(lock_);
                if (cancelled_) return CANCELLED;
                std::memset(memory_ + at, 0, end - at);
                at = end;
            } else if (int failed = fill(spans_[next_], &at, stop, resident_only)) {
                return failed;
            }
            // Atomic for who looks at it meanwhile.
            __atomic_fetch_add(done_, at - before, __ATOMIC_RELAXED);
            if (at < stop) {
                std::uint64_t whole = (at - hashed) / (16 * BLAKE3_CHUNK_BYTES) * (16 * BLAKE3_CHUNK_BYTES);
                hash_.add(bytes_at(hashed), whole, false);
                hashed += whole;
            }
        }
        hash_.add(bytes_at(hashed), stop - hashed, true);
        return OK;
    }

    // The next bytes of a span, as many as come at once.
    int fill(const Span &span, std::uint64_t *at, std::uint64_t stop, bool resident_only) {
        std::uint64_t last = span.stop < stop ? span.stop : stop;
        off_t offset = static_cast<off_t>(span.file_offset + static_cast<std::int64_t>(*at - span.start));
        int descriptor = static_cast<int>(span.descriptor);
        ssize_t count;
        {
            std::lock_guard guard(lock_);
            if (cancelled_) return CANCELLED;
            iovec place = {memory_ + *at, last - *at < STEP_BYTES ? last - *at : STEP_BYTES};
            count = preadv2(descriptor, &place, 1, offset, RWF_NOWAIT);
        }
        if (count < 0 && (errno == EAGAIN || errno == EOPNOTSUPP)) {
            // Some file systems never tell: then what comes is mostly there, and is copied while a core has it.
            std::uint64_t most = errno == EOPNOTSUPP ? STEP_BYTES : unit_bytes_;
            if (resident_only) return NOT_RESIDENT;
            static thread_local std::vector<char> buffer;
            buffer.resize(unit_bytes_);
            count = pread(descriptor, buffer.data(), last - *at < most ? last - *at : most, offset);
            if (count > 0) {
                std::lock_guard guard(lock_);
                if (cancelled_) return CANCELLED;
                std::memcpy(memory_ + *at, buffer.data(), static_cast<std::size_t>(count));
            }
        }
        if (count == 0) return TOO_SHORT;
        if (count < 0 && errno != EINTR) {
            error_ = errno;
            return READ_FAILED;
        }
        if (count > 0) *at += static_cast<std::uint64_t>(count);
        return OK;
    }

    const std::uint8_t *bytes_at(std::uint64_t at) const { return reinterpret_cast<const std::uint8_t *>(memory_ + at); }

    char *memory_;
    std::uint64_t position_, stop_, unit_bytes_, *done_;
    std::vector<Span> spans_;
    std::size_t next_ = 0;
    Blake3 hash_;
    std::mutex lock_;
    int error_ = 0;
    bool cancelled_ = false;
};

}  // namespace pilotlight

using namespace pilotlight;

// `spans` is count times (descriptor, offset in the file, start, stop), by their place in [start, stop) of the memory. `done` is where bytes are
// counted as they come.
PILOTLIGHT_EXPORT int pilotlight_read_open(char *memory, std::uint64_t start, std::uint64_t stop, std::uint64_t unit_bytes,
                                           const std::int64_t *spans, int count, std::uint64_t *done, FileRead **read) {
    if (start > stop || !unit_bytes || unit_bytes > BLAKE3_MOST_BYTES) return fail(MISUSED, "units are of 1 byte to 1 MiB");
    *read = new FileRead(memory, start, stop, unit_bytes, spans, count, done);
    return OK;
}

// Blocks. Adds 32 bytes to `digests` and 1 to `units` for each unit that is done; called again, it goes on at the next.
PILOTLIGHT_EXPORT int pilotlight_read_run(FileRead *read, int resident_only, std::uint8_t *digests, int *units, int *error) {
    return read->run(resident_only != 0, digests, units, error);
}
PILOTLIGHT_EXPORT void pilotlight_read_cancel(FileRead *read) { read->cancel(); }
PILOTLIGHT_EXPORT void pilotlight_read_close(FileRead *read) { delete read; }

// Has the system give [memory, memory + bytes) its pages now; errno where it does not.
PILOTLIGHT_EXPORT int pilotlight_populate(char *memory, std::uint64_t bytes) { return populated(memory, bytes); }

PILOTLIGHT_EXPORT void pilotlight_blake3(const std::uint8_t *data, std::uint64_t bytes, std::uint8_t *digest) {
    auto hash = std::make_unique<Blake3>();
    hash->add(data, bytes, true);
    hash->digest(digest);
}

// The same by one instruction set's compression alone, for tests: 0, or MISUSED where this processor has not got it.
PILOTLIGHT_EXPORT int pilotlight_blake3_lanes(const char *kind, const std::uint8_t *data, std::uint8_t *values) {
    Blake3Inputs inputs = {data, BLAKE3_CHUNK_BYTES / BLAKE3_BLOCK_BYTES, 0, true, 0, CHUNK_START, CHUNK_END};
#ifdef __x86_64__
    if (!std::strcmp(kind, "avx512") && __builtin_cpu_supports("avx512f")) return blake3_avx512(inputs, values), OK;
    if (!std::strcmp(kind, "avx2") && __builtin_cpu_supports("avx2")) return blake3_avx2(inputs, values), OK;
#endif
    if (!std::strcmp(kind, "portable")) return blake3_portable(inputs, values), OK;
    return fail(MISUSED, std::string(kind) + ": not on this processor");
}
