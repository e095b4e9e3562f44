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

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "../blake3/blake3.h"
#include "driver.h"

extern "C" {
#include "../blake3/blake3_impl.h"
}

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

// The system call, which headers of today's distributions do not name (Linux 6.5).
constexpr long CACHESTAT = 451;

// What is read before it is hashed: little enough for the second cache of a core.
constexpr std::uint64_t STEP_BYTES = 256 << 10;
// What is entered in a file at once: a cancel waits for no more, and behind it the descriptor may be another file's.
constexpr std::uint64_t ENTERED_BYTES = 2 << 20;
// What is hashed at once but for a unit's end: as many of BLAKE3's chunks as the widest vectors take.
constexpr std::uint64_t HASH_BYTES = MAX_SIMD_DEGREE * BLAKE3_CHUNK_LEN;

// The file that memory is a mapping of, and where the memory starts in it.
struct Backing {
    int descriptor;  // -1: none
    std::uint64_t offset;
};

struct Span {
    std::int64_t descriptor, file_offset;
    std::uint64_t start, stop;  // from the start of the memory
};

const std::uintptr_t PAGE_BYTES = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));

// Memory that is mapped, from the start of its first page on.
struct Pages {
    Pages(char *start, std::uint64_t bytes)
        : first(reinterpret_cast<std::uintptr_t>(start) & ~(PAGE_BYTES - 1)), bytes(reinterpret_cast<std::uintptr_t>(start) + bytes - first) {}

    void *start() const { return reinterpret_cast<void *>(first); }

    // Whether the system has all of them. What it has not mapped yet, it maps when it is written to.
    bool are_there() const {
        std::vector<unsigned char> there((bytes + PAGE_BYTES - 1) / PAGE_BYTES);
        if (mincore(start(), bytes, there.data()) != 0) return false;
        for (unsigned char page : there)
            if (!(page & 1)) return false;
        return true;
    }

    // Has the system make and map those that are not there; errno where it does not.
    int populate() const {
        while (madvise(start(), bytes, MADV_POPULATE_WRITE) != 0)
            if (errno != EINTR && errno != EAGAIN) return errno;
        return 0;
    }

    std::uintptr_t first;
    std::uint64_t bytes;
};

}  // namespace

class FileRead {
  public:
    FileRead(char *memory, Backing backing, std::uint64_t start, std::uint64_t stop, std::uint64_t unit_bytes, const std::int64_t *spans,
             int count, std::uint64_t *done)
        : memory_(memory), backing_(backing), position_(start), stop_(stop), unit_bytes_(unit_bytes), done_(done) {
        for (int index = 0; index < count; index++, spans += 4)
            spans_.push_back({spans[0], spans[1], static_cast<std::uint64_t>(spans[2]), static_cast<std::uint64_t>(spans[3])});
    }

    int run(bool resident_only, std::uint8_t *digests, int *units, int *error) {
        bool there = Pages(memory_ + position_, stop_ - position_).are_there();
        if (!there && !enter_pages()) return CANCELLED;
        while (position_ < stop_) {
            std::uint64_t size = stop_ - position_ < unit_bytes_ ? stop_ - position_ : unit_bytes_;
            if (int failed = fill_unit(position_ + size, there, resident_only)) {
                *error = error_;
                return failed;
            }
            std::uint8_t digest[BLAKE3_OUT_LEN];
            blake3_hasher_finalize(&hash_, digest, sizeof digest);
            std::lock_guard guard(lock_);
            if (cancelled_) return CANCELLED;
            std::memcpy(digests + *units * BLAKE3_OUT_LEN, digest, sizeof digest);
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
    // Has the system enter what pages are missing in the file, empty; false: cancelled. To map and clear them is then a matter of each thread
    // alone. In shared memory each page that is entered takes two locks of the file, for which other threads spin: on sixteen cores that costs
    // more than all else. So one thread enters pages at a time, and the others sleep. Where it fails, populate() finds out why.
    bool enter_pages() {
        if (backing_.descriptor < 0) return true;
        static std::mutex one_at_a_time;
        std::lock_guard turn(one_at_a_time);
        for (std::uint64_t at = position_; at < stop_; at += ENTERED_BYTES) {
            std::uint64_t bytes = stop_ - at < ENTERED_BYTES ? stop_ - at : ENTERED_BYTES;
            std::lock_guard guard(lock_);
            if (cancelled_) return false;
            if (fallocate(backing_.descriptor, FALLOC_FL_KEEP_SIZE, static_cast<off_t>(backing_.offset + at), static_cast<off_t>(bytes))) break;
        }
        return true;
    }

    int fill_unit(std::uint64_t stop, bool there, bool resident_only) {
        blake3_hasher_init(&hash_);
        next_ = 0;
        if (!there && (error_ = Pages(memory_ + position_, stop - position_).populate())) return NO_MEMORY;
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
            // Atomic: other threads read it meanwhile.
            __atomic_fetch_add(done_, at - before, __ATOMIC_RELAXED);
            if (at < stop) {
                std::uint64_t whole = (at - hashed) / HASH_BYTES * HASH_BYTES;
                blake3_hasher_update(&hash_, memory_ + hashed, whole);
                hashed += whole;
            }
        }
        blake3_hasher_update(&hash_, memory_ + hashed, stop - hashed);
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
        if (count < 0 && errno == EAGAIN && passed_refusal(descriptor, offset)) return OK;
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

    // Whether the system has the next byte in its memory all the same. A read that must not wait is refused now and then for a page that is
    // there (seen on Linux 6.18 for up to half of the chunks, after other reads of the file); a read of one byte, which may wait, gets past it.
    // Asked once for a place: the second refusal is believed.
    bool passed_refusal(int descriptor, off_t offset) {
        struct {
            std::uint64_t offset, bytes;
        } range = {static_cast<std::uint64_t>(offset), 1};
        struct {
            std::uint64_t cached, dirty, under_writeback, evicted, recently_evicted;
        } found = {};
        char byte;
        bool passed = offset != refused_at_ && syscall(CACHESTAT, static_cast<unsigned>(descriptor), &range, &found, 0) == 0 && found.cached > 0 &&
                      pread(descriptor, &byte, 1, offset) == 1;
        if (passed) refused_at_ = offset;
        errno = EAGAIN;
        return passed;
    }

    char *memory_;
    Backing backing_;
    std::uint64_t position_, stop_, unit_bytes_, *done_;
    std::vector<Span> spans_;
    std::size_t next_ = 0;
    blake3_hasher hash_;
    std::mutex lock_;
    off_t refused_at_ = -1;
    int error_ = 0;
    bool cancelled_ = false;
};

}  // namespace pilotlight

using namespace pilotlight;

// `spans` is count times (descriptor, offset in the file, start, stop), by their place in [start, stop) of the memory. `done` is where bytes are
// counted as they come. `backing` and `backing_offset`: the file that the memory is a mapping of, -1 for none, and where it starts there.
PILOTLIGHT_EXPORT int pilotlight_read_open(char *memory, int backing, std::uint64_t backing_offset, std::uint64_t start, std::uint64_t stop,
                                           std::uint64_t unit_bytes, const std::int64_t *spans, int count, std::uint64_t *done,
                                           FileRead **read) {
    if (start > stop || !unit_bytes) return fail(MISUSED, "units have no bytes, or the read ends before it starts");
    *read = new FileRead(memory, {backing, backing_offset}, start, stop, unit_bytes, spans, count, done);
    return OK;
}

// Blocks. Adds 32 bytes to `digests` and 1 to `units` for each unit that is done; called again, it goes on at the next.
PILOTLIGHT_EXPORT int pilotlight_read_run(FileRead *read, int resident_only, std::uint8_t *digests, int *units, int *error) {
    return read->run(resident_only != 0, digests, units, error);
}
PILOTLIGHT_EXPORT void pilotlight_read_cancel(FileRead *read) { read->cancel(); }
PILOTLIGHT_EXPORT void pilotlight_read_close(FileRead *read) { delete read; }

// Has the system give [memory, memory + bytes) its pages now; errno where it does not.
PILOTLIGHT_EXPORT int pilotlight_populate(char *memory, std::uint64_t bytes) { return Pages(memory, bytes).populate(); }

PILOTLIGHT_EXPORT void pilotlight_blake3(const std::uint8_t *data, std::uint64_t bytes, std::uint8_t *digest) {
    blake3_hasher hash;
    blake3_hasher_init(&hash);
    blake3_hasher_update(&hash, data, bytes);
    blake3_hasher_finalize(&hash, digest, BLAKE3_OUT_LEN);
}

// The chaining values of 16 chunks by one instruction set's compression alone, for tests: 0, or MISUSED where this processor has not got it.
PILOTLIGHT_EXPORT int pilotlight_blake3_chunks(const char *kind, const std::uint8_t *data, std::uint8_t *values) {
    struct {
        const char *kind;
        bool is_here;
        decltype(&blake3_hash_many_portable) hash;
    } const all[] = {
        {"portable", true, blake3_hash_many_portable},
#ifdef __x86_64__
        {"sse2", true, blake3_hash_many_sse2},
        {"sse41", __builtin_cpu_supports("sse4.1") != 0, blake3_hash_many_sse41},
        {"avx2", __builtin_cpu_supports("avx2") != 0, blake3_hash_many_avx2},
        {"avx512", __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl"), blake3_hash_many_avx512},
#endif
    };
    const std::uint8_t *chunks[16];
    for (int index = 0; index < 16; index++) chunks[index] = data + index * BLAKE3_CHUNK_LEN;
    for (auto &one : all) {
        if (!one.is_here || std::strcmp(kind, one.kind)) continue;
        one.hash(chunks, 16, BLAKE3_CHUNK_LEN / BLAKE3_BLOCK_LEN, IV, 0, true, 0, CHUNK_START, CHUNK_END, values);
        return OK;
    }
    return fail(MISUSED, std::string(kind) + ": not on this processor");
}
