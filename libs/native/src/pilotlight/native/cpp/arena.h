// An address range of a device, and the physical memory behind parts of it.
//
//     addresses   [ chunk )[ chunk )      nothing      [ chunk )
//                    |        |                           |
//     physical    [ handle ) [ handle ) <- also the chunk of another place, when shared
//
// The driver unmaps what was mapped in one piece, in one piece. Where part of a chunk is taken away, what stays of it is moved to new
// memory and mapped where it was: nothing that lies there changes its address.
//
// The driver takes 0.3 to 0.45 ms to unmap a GiB, as much to release it, and 1.9 ms to create it again. So memory that is taken away
// stays with the arena, as far as it may (`keep`), and is mapped again for whatever needs memory next:
//
//     in use   -- unback: no call of the driver -->  idle, still mapped at its old place (stale)
//     idle     -- back, at the old place         -->  in use, no call of the driver
//              -- back, elsewhere                -->  in use, unmapped at its old place, and mapped
//              -- beyond what may be kept, or a create that finds no memory  -->  released
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "driver.h"

namespace pilotlight {

// Calls of the driver, to see what backing costs.
enum Call { CREATE, MAP, UNMAP, ACCESS, RELEASE, WAIT, COPY, NUM_CALLS };
constexpr int BEHIND = NUM_CALLS;  // time of the arena's thread, in any of them

struct Books {
    std::atomic<std::uint64_t> physical_bytes{0};  // in use; what lies at several places counts once
    std::atomic<std::uint64_t> idle_bytes{0};      // kept, in use nowhere
    std::atomic<std::uint64_t> moved_bytes{0};
    std::atomic<std::uint64_t> calls[NUM_CALLS]{}, nanoseconds[NUM_CALLS + 1]{};
};

// Counts a call that is made while it lives.
class Counted {
  public:
    Counted(Books &books, Call call);
    ~Counted();

  private:
    Books &books_;
    const Call call_;
    const std::uint64_t start_;
};

// One piece of device memory; goes back to the driver when nothing refers to it.
struct Physical {
    CUmemHandle handle;
    std::uint64_t bytes;
    bool imported;
    bool exported = false;  // another process may have it, too
    bool idle = false;      // kept, in use nowhere
    int places = 0;         // chunks in use that map it
    int stale_places = 0;   // chunks that map it still
    const std::shared_ptr<Books> books;
    Physical(CUmemHandle handle, std::uint64_t bytes, bool imported, std::shared_ptr<Books> books);
    ~Physical();
    Physical(const Physical &) = delete;
    Physical &operator=(const Physical &) = delete;
};

using Memory = std::shared_ptr<Physical>;

struct Chunk {
    std::uint64_t start, stop;  // from the arena's beginning
    Memory memory;
};

class Arena {
  public:
    struct Range {
        std::uint64_t start, stop;
    };

    Arena(CUcontext context, int ordinal, std::uint64_t address, std::uint64_t bytes, std::uint64_t granule, bool rdma);
    ~Arena();

    // Puts memory behind ranges, which are in order, all or nothing; no chunk lies in two of them. Idle memory is used first, in pieces
    // that are not too short; the rest is created. Access is set once for what lies side by side: a device that copies meanwhile lets
    // each such call wait.
    int back(const std::vector<Range> &ranges, std::uint64_t chunk_bytes);
    // Takes the memory of ranges away, which are in order. All or nothing, unless what stays of a chunk had to go through the host,
    // because the device was full to the last granule, and is refused the memory that the chunk gave back: then it is gone, too.
    // `next_backed` tells. When it returns, nothing on the device uses them, and what may be kept is idle.
    int unback(const std::vector<Range> &ranges);
    // Takes whole chunks away without waiting for the device: nothing that runs may use them. What could not be unmapped stays.
    int detach(std::uint64_t start, std::uint64_t stop);
    // The first backed bytes from `at` on, as far as they go on; false if there are none.
    bool next_backed(std::uint64_t at, std::uint64_t *start, std::uint64_t *stop);
    // Maps given memory from a place on, one piece behind the other; the same memory may lie at several.
    int attach(std::uint64_t start, const std::vector<Memory> &memories);
    int create(std::uint64_t bytes, Memory *memory);
    int import(std::uint64_t start, std::uint64_t bytes, int fd);
    int export_chunk(std::uint64_t offset, int *fd, std::uint64_t *start, std::uint64_t *stop);
    int share(std::uint64_t start, std::uint64_t stop, std::uint64_t from);
    // From now on, so many idle bytes are kept at most. What is beyond them the thread releases.
    void keep(std::uint64_t most_idle_bytes);
    // Unmaps all stale places now, and releases idle memory down to so many bytes.
    int settle(std::uint64_t idle_bytes);

    const CUcontext context;
    // Nothing on the device uses it any more: it ends without waiting for that, which would end captures of other threads.
    bool done = false;
    const std::uint64_t address, bytes, granule;
    const std::shared_ptr<Books> books = std::make_shared<Books>();

  private:
    using Chunks = std::map<std::uint64_t, Chunk>;  // by start
    // What stays of a chunk of which a part is taken away: its contents, in new memory or, while the device is full, in the host's.
    struct Rest {
        std::uint64_t start, stop;
        Memory memory;
        std::vector<char> saved;
    };
    // One call's turn at the arena: the thread's calls of the driver are short, and it lets others go first.
    class Turn {
      public:
        explicit Turn(Arena &arena);
        ~Turn();
        int failed = OK;

      private:
        Arena &arena_;
        std::unique_lock<std::timed_mutex> held_;
    };

    int check_range(std::uint64_t start, std::uint64_t stop) const;
    bool backed_anywhere(std::uint64_t start, std::uint64_t stop) const;
    bool backed_everywhere(std::uint64_t start, std::uint64_t stop) const;
    int obtain(std::uint64_t size, Memory *memory);
    int map(std::uint64_t start, const Memory &memory);
    int allow(std::uint64_t start, std::uint64_t stop);
    int unmap(std::uint64_t start, std::uint64_t stop);
    int put(std::uint64_t start, const std::vector<Memory> &memories);
    int check_bare(const std::vector<Range> &ranges) const;
    int fill(std::uint64_t start, std::uint64_t stop, std::uint64_t chunk_bytes, std::vector<Range> &runs);
    CUmemAllocationProp properties() const;

    // What stays of chunks; see rests.cpp.
    int save(std::vector<Rest> &rests);
    int place(Rest &rest);
    int copy_out(const std::vector<Rest> &rests);

    // Idle memory; see idle.cpp.
    bool keepable(const Physical &memory) const;
    void lay_by(const Memory &memory);
    void lay_by_or_drop(const Memory &memory);
    void drop(const Memory &memory);
    void retire(const Chunk &chunk);
    bool resume(std::uint64_t at, std::uint64_t stop);
    int reuse(std::uint64_t at_least, std::uint64_t at_most, Memory *memory);
    std::uint64_t next_stale(std::uint64_t at, std::uint64_t stop) const;
    int clear(std::uint64_t start, std::uint64_t stop, bool resumable_too);
    int unmap_stale(Chunks::iterator stale);
    int unmap_stale_of(const Memory &memory);
    int release_shortest();
    int shed(std::uint64_t idle_bytes);
    bool has_chores() const;
    void work();

    const int ordinal_;
    const bool rdma_;
    Chunks chunks_;
    Chunks stale_;  // mapped still, in use no longer
    std::multimap<std::uint64_t, Memory> idle_;  // by length
    std::atomic<std::uint64_t> most_idle_bytes_{0};
    std::atomic<bool> refused_{false};  // the driver refused the thread: it waits until there is something new
    bool closing_ = false;
    std::atomic<int> waiting_{0};  // calls that want a turn
    std::timed_mutex lock_;
    std::condition_variable_any changed_;
    std::thread thread_;
};

// [start, stop), for what is said of failures.
std::string range_text(std::uint64_t start, std::uint64_t stop);

// An arena ends, and its pools with it, whatever lies in them; see pool.cpp.
void end_pools(const Arena *arena);

}  // namespace pilotlight
