// An arena's functions, as Python calls them.
#include "arena.h"

using namespace pilotlight;

// Reserves addresses. At `address` and nowhere else, if it is not 0: TAKEN where something is there already.
PILOTLIGHT_EXPORT int pilotlight_arena_open(CUcontext context, int ordinal, std::uint64_t address, std::uint64_t bytes, Arena **arena) {
    Driver &api = driver();
    PILOTLIGHT_TRY(api.ctx_set_current(context));
    CUdevice device = 0;
    int rdma = 0;
    PILOTLIGHT_TRY(api.device_get(&device, ordinal));
    PILOTLIGHT_TRY(api.device_get_attribute(&rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device));
    CUmemAllocationProp wanted{};
    wanted.type = 1;
    wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    wanted.location = {1, ordinal};
    std::size_t granule = 0;
    PILOTLIGHT_TRY(api.mem_get_allocation_granularity(&granule, &wanted, 0));
    if (bytes % granule || !bytes) return fail(MISUSED, "an arena is made of whole granules of " + std::to_string(granule) + " bytes");
    CUdeviceptr got = 0;
    PILOTLIGHT_TRY(api.mem_address_reserve(&got, bytes, granule, address, 0));
    if (address && got != address) {
        api.mem_address_free(got, bytes);
        return fail(TAKEN, "the driver gives addresses at " + std::to_string(got) + " instead of " + std::to_string(address));
    }
    *arena = new Arena(context, ordinal, got, bytes, granule, rdma != 0);
    return OK;
}

PILOTLIGHT_EXPORT void pilotlight_arena_close(Arena *arena, int done) {
    end_pools(arena);
    arena->done = done != 0;
    delete arena;
}
PILOTLIGHT_EXPORT std::uint64_t pilotlight_arena_address(Arena *arena) { return arena->address; }
PILOTLIGHT_EXPORT std::uint64_t pilotlight_arena_granule(Arena *arena) { return arena->granule; }
PILOTLIGHT_EXPORT std::uint64_t pilotlight_arena_physical_bytes(Arena *arena) { return arena->books->physical_bytes; }
PILOTLIGHT_EXPORT std::uint64_t pilotlight_arena_idle_bytes(Arena *arena) { return arena->books->idle_bytes; }
// Of each kind of call their number, then of each kind the nanoseconds, then those of the thread, then the bytes that were moved.
PILOTLIGHT_EXPORT void pilotlight_arena_counts(Arena *arena, std::uint64_t *counts) {
    for (const auto &calls : arena->books->calls) *counts++ = calls;
    for (const auto &nanoseconds : arena->books->nanoseconds) *counts++ = nanoseconds;
    *counts = arena->books->moved_bytes;
}

// `ranges` are pairs of [start, stop), in order, here and below.
static std::vector<Arena::Range> found_in(const std::uint64_t *ranges, std::uint64_t count) {
    std::vector<Arena::Range> found;
    for (std::uint64_t index = 0; index < count; index++) found.push_back({ranges[2 * index], ranges[2 * index + 1]});
    return found;
}
PILOTLIGHT_EXPORT int pilotlight_arena_back(Arena *arena, const std::uint64_t *ranges, std::uint64_t count, std::uint64_t chunk_bytes) {
    return arena->back(found_in(ranges, count), chunk_bytes);
}
PILOTLIGHT_EXPORT int pilotlight_arena_unback(Arena *arena, const std::uint64_t *ranges, std::uint64_t count) {
    return arena->unback(found_in(ranges, count));
}
PILOTLIGHT_EXPORT void pilotlight_arena_keep(Arena *arena, std::uint64_t most_idle_bytes) { arena->keep(most_idle_bytes); }
PILOTLIGHT_EXPORT int pilotlight_arena_settle(Arena *arena, std::uint64_t idle_bytes) { return arena->settle(idle_bytes); }
// The first backed bytes from `at` on: [start, stop), empty where there are none.
PILOTLIGHT_EXPORT void pilotlight_arena_next(Arena *arena, std::uint64_t at, std::uint64_t *start, std::uint64_t *stop) {
    if (!arena->next_backed(at, start, stop)) *start = *stop = at;
}
PILOTLIGHT_EXPORT int pilotlight_arena_share(Arena *arena, std::uint64_t start, std::uint64_t stop, std::uint64_t from) {
    return arena->share(start, stop, from);
}
PILOTLIGHT_EXPORT int pilotlight_arena_export(Arena *arena, std::uint64_t offset, int *fd, std::uint64_t *start, std::uint64_t *stop) {
    return arena->export_chunk(offset, fd, start, stop);
}
PILOTLIGHT_EXPORT int pilotlight_arena_import(Arena *arena, std::uint64_t start, std::uint64_t bytes, int fd) {
    return arena->import(start, bytes, fd);
}
