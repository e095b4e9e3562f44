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
    int unback(std::uint64_t start, std::uint64_t stop);
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
    using Ranges = std::vector<std::pair<std::uint64_t, std::uint64_t>>;

    int check_range(std::uint64_t start, std::uint64_t stop) const;
    bool backed_anywhere(std::uint64_t start, std::uint64_t stop) const;
    bool backed_everywhere(std::uint64_t start, std::uint64_t stop) const;
    int map(std::uint64_t start, const Memory &memory);
    int allow(std::uint64_t start, std::uint64_t stop);
    int unmap(Chunks::iterator chunk);
    int keep(Chunks::iterator chunk, const Ranges &rests);
    int copy_out(std::uint64_t start, const Memory &memory);
    CUmemAllocationProp properties() const;

    const int ordinal_;
    const bool rdma_;
    Chunks chunks_;
};

// An arena ends, and its pools with it, whatever lies in them; see pool.cpp.
void end_pools(const Arena *arena);

}  // namespace pilotlight
