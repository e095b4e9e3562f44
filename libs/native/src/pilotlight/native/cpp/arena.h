// An address range of a device, and the physical memory behind parts of it.
//
//     addresses   [ chunk )[ chunk )      nothing      [ chunk )
//                    |        |                           |
//     physical    [ handle ) [ handle ) <- also the chunk of another place, when shared
//
// The driver unmaps what was mapped in one piece, in one piece. Where part of a chunk is taken away, what stays of it is moved to new
// memory and mapped where it was: nothing that lies there changes its address.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "driver.h"

namespace pilotlight {

// One piece of device memory; goes back to the driver when no chunk refers to it.
struct Physical {
    CUmemHandle handle;
    std::uint64_t bytes;
    bool imported;
    std::uint64_t *total;  // the arena's count of its own physical bytes
    Physical(CUmemHandle handle, std::uint64_t bytes, bool imported, std::uint64_t *total);
    ~Physical();
    Physical(const Physical &) = delete;
    Physical &operator=(const Physical &) = delete;
};

using Memory = std::shared_ptr<Physical>;

struct Chunk {
    std::uint64_t start, stop;  // from the arena's beginning
    Memory memory;
};

// Calls that were made of the driver, to see what backing costs.
struct Counts {
    std::uint64_t created, mapped, unmapped, access_set, moved_bytes;
};

class Arena {
  public:
    Arena(CUcontext context, int ordinal, std::uint64_t address, std::uint64_t bytes, std::uint64_t granule, bool rdma);
    ~Arena();

    int back(std::uint64_t start, std::uint64_t stop, std::uint64_t chunk_bytes);
    // All or nothing, unless what stays of a chunk had to go through the host, because the device was full to the last granule, and is
    // refused the memory that the chunk gave back: then it is gone, too. `next_backed` tells.
    int unback(std::uint64_t start, std::uint64_t stop);
    // Takes whole chunks away without waiting for the device: nothing that runs may use them. What could not be unmapped stays.
    int detach(std::uint64_t start, std::uint64_t stop);
    // The first backed bytes from `at` on, as far as they go on; false if there are none.
    bool next_backed(std::uint64_t at, std::uint64_t *start, std::uint64_t *stop) const;
    // Maps given memory at a place; the same memory may lie at several.
    int attach(std::uint64_t start, const Memory &memory);
    int create(std::uint64_t bytes, Memory *memory);
    int import(std::uint64_t start, std::uint64_t bytes, int fd);
    int export_chunk(std::uint64_t offset, int *fd, std::uint64_t *start, std::uint64_t *stop);
    int share(std::uint64_t start, std::uint64_t stop, std::uint64_t from);

    const CUcontext context;
    const std::uint64_t address, bytes, granule;
    std::uint64_t physical_bytes = 0;
    Counts counts{};
    std::recursive_mutex lock;

  private:
    using Chunks = std::map<std::uint64_t, Chunk>;  // by start
    // What stays of a chunk of which a part is taken away: its contents, in new memory or, while the device is full, in the host's.
    struct Rest {
        std::uint64_t start, stop;
        Memory memory;
        std::vector<char> saved;
    };

    int check_range(std::uint64_t start, std::uint64_t stop) const;
    bool backed_anywhere(std::uint64_t start, std::uint64_t stop) const;
    bool backed_everywhere(std::uint64_t start, std::uint64_t stop) const;
    int map(std::uint64_t start, const Memory &memory);
    int allow(std::uint64_t start, std::uint64_t stop);
    int unmap(Chunks::iterator chunk);
    int save(const Chunk &chunk, Rest *rest);
    int place(Rest &rest);
    int copy_out(std::uint64_t start, const Memory &memory);
    CUmemAllocationProp properties() const;

    const int ordinal_;
    const bool rdma_;
    Chunks chunks_;
};

// An arena ends, and its pools with it, whatever lies in them; see pool.cpp.
void end_pools(const Arena *arena);

}  // namespace pilotlight
