// Memory for torch's own allocator, out of a region of an arena: what torch calls for a MemPool's segments.
//
//     region   [ chunk 0 )[ chunk 1 )[ chunk 2 )...       a chunk has memory while a segment lies in it
//              [ segment )[ segment ..... )
//
// A segment takes the lowest place that holds it, so the same calls give the same addresses in every process. Pools of one group put the
// same memory behind their chunk i: their models run one at a time, and none expects its scratch memory back as it left it.
#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "arena.h"

namespace pilotlight {

namespace {

struct Group {
    std::map<std::uint64_t, std::weak_ptr<Physical>> chunks;  // by index
};

// A segment that was taken, or given back.
struct Event {
    std::uint64_t taken, address, bytes;
};

constexpr std::uint64_t MOST_EVENTS = 4096;

struct Pool {
    Arena *arena;
    std::uint64_t start, stop, chunk_bytes;
    std::shared_ptr<Group> group;
    std::map<std::uint64_t, std::uint64_t> segments;  // start -> stop
    std::set<std::uint64_t> mapped;                   // chunks of this pool that have memory
    std::uint64_t sequence_hash = 1469598103934665603ULL;
    std::uint64_t allocations = 0;
    std::vector<Event> events;  // the first ones, in order
    std::uint64_t num_events = 0;

    void note(const Event &event) {
        // A pool for eager work lives as long as its process.
        if (num_events++ < MOST_EVENTS) events.push_back(event);
    }
};

std::recursive_mutex pools_lock;
std::vector<std::unique_ptr<Pool>> pools;
std::atomic<int> selected{-1};

std::uint64_t lowest_place(const Pool &pool, std::uint64_t bytes) {
    std::uint64_t at = pool.start;
    for (auto &[start, stop] : pool.segments) {
        if (start - at >= bytes) break;
        at = stop;
    }
    return at;
}

// Memory is also asked for while a graph is captured, which forbids it unless told that it is meant.
class CaptureAllowed {
  public:
    CaptureAllowed() { driver().thread_exchange_stream_capture_mode(&mode_); }
    ~CaptureAllowed() { driver().thread_exchange_stream_capture_mode(&mode_); }

  private:
    int mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// Puts memory behind chunks [first, last], none of which has any.
int map_chunks(Pool &pool, std::uint64_t first, std::uint64_t last) {
    std::vector<Memory> memories;
    for (std::uint64_t index = first; index <= last; index++) {
        Memory memory = pool.group->chunks[index].lock();
        if (!memory) {
            if (int failed = check(driver().ctx_set_current(pool.arena->context), "driver().ctx_set_current")) return failed;
            if (int failed = pool.arena->create(pool.chunk_bytes, &memory)) return failed;
            pool.group->chunks[index] = memory;
        }
        memories.push_back(memory);
    }
    if (int failed = pool.arena->attach(pool.start + first * pool.chunk_bytes, memories)) return failed;
    for (std::uint64_t index = first; index <= last; index++) pool.mapped.insert(index);
    return OK;
}

// Takes the memory of chunks [first, last] away in which no segment lies. Does not wait: nothing that runs may use it, and within a capture
// nothing may wait for the device.
int trim(Pool &pool, std::uint64_t first, std::uint64_t last) {
    for (std::uint64_t index = first; index <= last; index++) {
        if (!pool.mapped.count(index)) continue;
        std::uint64_t start = pool.start + index * pool.chunk_bytes, stop = start + pool.chunk_bytes;
        auto after = pool.segments.lower_bound(stop);
        if (after != pool.segments.begin() && std::prev(after)->second > start) continue;
        if (int failed = pool.arena->detach(start, stop)) return failed;
        pool.mapped.erase(index);
    }
    return OK;
}

}  // namespace

// Otherwise a pool that was not closed would take what is freed in the next arena, which may well lie where this one did.
void end_pools(const Arena *arena) {
    std::lock_guard guard(pools_lock);
    for (auto &pool : pools)
        if (pool && pool->arena == arena) pool.reset();
}

}  // namespace pilotlight

using namespace pilotlight;

// Makes a pool of a region. `group_of` is another pool whose memory it shares, or -1.
PILOTLIGHT_EXPORT int pilotlight_pool_open(Arena *arena, std::uint64_t start, std::uint64_t stop, std::uint64_t chunk_bytes,
                                           int group_of, int *pool) {
    std::lock_guard guard(pools_lock);
    if (!chunk_bytes || chunk_bytes % arena->granule || start % arena->granule || stop > arena->bytes || start >= stop ||
        (stop - start) % chunk_bytes)
        return fail(MISUSED, "a pool is made of whole chunks, and a chunk of whole granules, within the arena");
    std::shared_ptr<Group> group = std::make_shared<Group>();
    if (group_of >= 0) {
        if (group_of >= static_cast<int>(pools.size()) || !pools[group_of])
            return fail(MISUSED, "there is no pool " + std::to_string(group_of));
        if (pools[group_of]->chunk_bytes != chunk_bytes) return fail(MISUSED, "pools of one group have chunks of one size");
        if (pools[group_of]->arena != arena) return fail(MISUSED, "pools of one group lie in one arena");
        group = pools[group_of]->group;
    }
    auto made = std::make_unique<Pool>();
    made->arena = arena;
    made->start = start;
    made->stop = stop;
    made->chunk_bytes = chunk_bytes;
    made->group = group;
    pools.push_back(std::move(made));
    *pool = static_cast<int>(pools.size()) - 1;
    return OK;
}

// Gives a pool's memory back; nothing may lie in it.
PILOTLIGHT_EXPORT int pilotlight_pool_close(int number) {
    std::lock_guard guard(pools_lock);
    if (number < 0 || number >= static_cast<int>(pools.size()) || !pools[number])
        return fail(MISUSED, "there is no pool " + std::to_string(number));
    Pool &pool = *pools[number];
    if (!pool.segments.empty())
        return fail(MISUSED, "pool " + std::to_string(number) + " still holds " + std::to_string(pool.segments.size()) + " segments");
    if (!pool.mapped.empty()) {
        // Left by a device that did not answer when its segments were freed.
        PILOTLIGHT_TRY(driver().ctx_set_current(pool.arena->context));
        PILOTLIGHT_TRY(driver().ctx_synchronize());
        if (int failed = trim(pool, *pool.mapped.begin(), *pool.mapped.rbegin())) return failed;
    }
    if (selected == number) selected = -1;
    pools[number].reset();
    return OK;
}

// From now on, segments come out of this pool (-1: none); returns the one before.
PILOTLIGHT_EXPORT int pilotlight_pool_select(int number) { return selected.exchange(number); }

// How many bytes of a pool's addresses have memory, how many segments it gave so far, and a hash over their sizes and places.
PILOTLIGHT_EXPORT int pilotlight_pool_state(int number, std::uint64_t *mapped_bytes, std::uint64_t *allocations, std::uint64_t *hash) {
    std::lock_guard guard(pools_lock);
    if (number < 0 || number >= static_cast<int>(pools.size()) || !pools[number])
        return fail(MISUSED, "there is no pool " + std::to_string(number));
    *mapped_bytes = pools[number]->mapped.size() * pools[number]->chunk_bytes;
    *allocations = pools[number]->allocations;
    *hash = pools[number]->sequence_hash;
    return OK;
}

// The first `most` of what was taken and given back, in order: whether it was taken, where it lies, its bytes. `*count` is how many there were;
// of more than 4096 the first ones are known.
PILOTLIGHT_EXPORT int pilotlight_pool_events(int number, std::uint64_t *events, std::uint64_t most, std::uint64_t *count) {
    std::lock_guard guard(pools_lock);
    if (number < 0 || number >= static_cast<int>(pools.size()) || !pools[number])
        return fail(MISUSED, "there is no pool " + std::to_string(number));
    const std::vector<Event> &all = pools[number]->events;
    *count = pools[number]->num_events;
    for (std::uint64_t event = 0; event < std::min<std::uint64_t>(most, all.size()); event++) {
        *events++ = all[event].taken;
        *events++ = all[event].address;
        *events++ = all[event].bytes;
    }
    return OK;
}

// A segment of a pool, as torch would have it.
PILOTLIGHT_EXPORT int pilotlight_pool_take(int number, std::uint64_t size, std::uint64_t *address) {
    std::lock_guard guard(pools_lock);
    if (!size || number < 0 || number >= static_cast<int>(pools.size()) || !pools[number])
        return fail(MISUSED, "there is no pool " + std::to_string(number) + ", or nothing is wanted of it");
    Pool &pool = *pools[number];
    std::uint64_t granule = pool.arena->granule;
    if (size > pool.stop - pool.start) return fail(OUT_OF_ROOM, "a pool has no addresses for " + std::to_string(size) + " bytes");
    std::uint64_t bytes = (size + granule - 1) / granule * granule;
    std::uint64_t place = lowest_place(pool, bytes);
    if (place + bytes > pool.stop) return fail(OUT_OF_ROOM, "a pool has no addresses for " + std::to_string(bytes) + " bytes more");
    CaptureAllowed allowed;
    std::uint64_t first = (place - pool.start) / pool.chunk_bytes, last = (place + bytes - 1 - pool.start) / pool.chunk_bytes;
    for (std::uint64_t index = first; index <= last; index++) {
        if (pool.mapped.count(index)) continue;
        std::uint64_t end = index;
        while (end < last && !pool.mapped.count(end + 1)) end++;
        if (int failed = map_chunks(pool, index, end)) {
            const std::string why = error_text();
            trim(pool, first, index);
            return fail(failed, why);
        }
        index = end;
    }
    pool.segments[place] = place + bytes;
    pool.allocations++;
    pool.note({1, pool.arena->address + place, bytes});
    pool.sequence_hash = (pool.sequence_hash ^ (place - pool.start) ^ (bytes * 0x9e3779b97f4a7c15ULL)) * 1099511628211ULL;
    *address = pool.arena->address + place;
    return OK;
}

// Two functions of the form that torch.cuda.memory.CUDAPluggableAllocator takes. Null: there is no memory, which torch reports.
PILOTLIGHT_EXPORT void *pilotlight_pool_malloc(ssize_t size, int, CUstream) {
    std::lock_guard guard(pools_lock);
    int number = selected;
    std::uint64_t address = 0;
    if (size <= 0 || number < 0 || pilotlight_pool_take(number, size, &address)) return nullptr;
    return reinterpret_cast<void *>(address);
}

// Waits for the device, as cudaFree does, which torch counts on: what still runs may use what is freed, on any stream. torch never frees a
// segment within a capture. Where the device does not answer, the memory stays until the pool is closed.
PILOTLIGHT_EXPORT void pilotlight_pool_free(void *pointer, ssize_t, int, CUstream) {
    std::lock_guard guard(pools_lock);
    for (auto &pool : pools) {
        if (!pool) continue;
        std::uint64_t address = reinterpret_cast<std::uint64_t>(pointer);
        if (address < pool->arena->address + pool->start || address >= pool->arena->address + pool->stop) continue;
        auto segment = pool->segments.find(address - pool->arena->address);
        if (segment == pool->segments.end()) continue;  // another pool has the same addresses
        std::uint64_t start = segment->first, stop = segment->second;
        pool->segments.erase(segment);
        pool->note({0, address, stop - start});
        if (check(driver().ctx_set_current(pool->arena->context), "driver().ctx_set_current")) return;
        if (check(driver().ctx_synchronize(), "driver().ctx_synchronize")) return;
        trim(*pool, (start - pool->start) / pool->chunk_bytes, (stop - 1 - pool->start) / pool->chunk_bytes);
        return;
    }
}
