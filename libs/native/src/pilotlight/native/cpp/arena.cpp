#include "arena.h"

#include <algorithm>
#include <cstdlib>

namespace pilotlight {

namespace {

std::string range_text(std::uint64_t start, std::uint64_t stop) {
    return "[" + std::to_string(start) + ", " + std::to_string(stop) + ")";
}

}  // namespace

Physical::Physical(CUmemHandle handle, std::uint64_t bytes, bool imported, std::uint64_t *total)
    : handle(handle), bytes(bytes), imported(imported), total(total) {
    *total += bytes;
}

Physical::~Physical() {
    driver().mem_release(handle);
    *total -= bytes;
}

Arena::Arena(CUcontext context, int ordinal, std::uint64_t address, std::uint64_t bytes, std::uint64_t granule, bool rdma)
    : context(context), address(address), bytes(bytes), granule(granule), ordinal_(ordinal), rdma_(rdma) {}

Arena::~Arena() {
    driver().ctx_set_current(context);
    driver().ctx_synchronize();
    for (auto &[start, chunk] : chunks_) driver().mem_unmap(address + start, chunk.stop - chunk.start);
    chunks_.clear();
    driver().mem_address_free(address, bytes);
}

CUmemAllocationProp Arena::properties() const {
    CUmemAllocationProp wanted{};
    wanted.type = 1;
    wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    wanted.location = {1, ordinal_};
    wanted.allocFlags.gpuDirectRDMACapable = rdma_ ? 1 : 0;
    return wanted;
}

int Arena::check_range(std::uint64_t start, std::uint64_t stop) const {
    if (start % granule || stop % granule || start >= stop || stop > bytes)
        return fail(MISUSED, range_text(start, stop) + " is not made of whole granules of the arena");
    return OK;
}

bool Arena::backed_anywhere(std::uint64_t start, std::uint64_t stop) const {
    auto next = chunks_.lower_bound(start);
    if (next != chunks_.end() && next->second.start < stop) return true;
    return next != chunks_.begin() && std::prev(next)->second.stop > start;
}

bool Arena::backed_everywhere(std::uint64_t start, std::uint64_t stop) const {
    auto chunk = chunks_.upper_bound(start);
    if (chunk == chunks_.begin()) return false;
    for (chunk = std::prev(chunk); chunk != chunks_.end() && chunk->second.start <= start; ++chunk) {
        start = std::max(start, chunk->second.stop);
        if (start >= stop) return true;
    }
    return false;
}

int Arena::create(std::uint64_t size, Memory *memory) {
    CUmemAllocationProp wanted = properties();
    CUmemHandle handle = 0;
    PILOTLIGHT_TRY(driver().mem_create(&handle, size, &wanted, 0));
    counts.created++;
    *memory = std::make_shared<Physical>(handle, size, false, &physical_bytes);
    return OK;
}

int Arena::map(std::uint64_t start, const Memory &memory) {
    PILOTLIGHT_TRY(driver().mem_map(address + start, memory->bytes, 0, memory->handle, 0));
    counts.mapped++;
    chunks_[start] = Chunk{start, start + memory->bytes, memory};
    return OK;
}

int Arena::allow(std::uint64_t start, std::uint64_t stop) {
    CUmemAccessDesc both{{1, ordinal_}, 3};
    counts.access_set++;
    return check(driver().mem_set_access(address + start, stop - start, &both, 1), "driver().mem_set_access");
}

int Arena::unmap(Chunks::iterator chunk) {
    PILOTLIGHT_TRY(driver().mem_unmap(address + chunk->second.start, chunk->second.stop - chunk->second.start));
    counts.unmapped++;
    chunks_.erase(chunk);
    return OK;
}

int Arena::back(std::uint64_t start, std::uint64_t stop, std::uint64_t chunk_bytes) {
    std::lock_guard guard(lock);
    if (int failed = check_range(start, stop)) return failed;
    if (chunk_bytes < granule || chunk_bytes % granule) return fail(MISUSED, "a chunk is made of whole granules");
    if (backed_anywhere(start, stop)) return fail(MISUSED, range_text(start, stop) + " is backed already, at least in part");
    PILOTLIGHT_TRY(driver().ctx_set_current(context));
    int failed = OK;
    for (std::uint64_t first = start; first < stop && !failed;) {
        // On a grid, so that growth and return by unequal steps cut few chunks.
        std::uint64_t last = std::min(stop, (first / chunk_bytes + 1) * chunk_bytes);
        Memory memory;
        failed = create(last - first, &memory);
        if (!failed) failed = map(first, memory);
        first = last;
    }
    if (!failed) failed = allow(start, stop);
    if (failed) {
        const std::string why = error_text();
        for (auto chunk = chunks_.lower_bound(start); chunk != chunks_.end() && chunk->first < stop;) {
            auto undone = chunk++;
            if (unmap(undone)) break;
        }
        return fail(failed, why);
    }
    return OK;
}

int Arena::attach(std::uint64_t start, const Memory &memory) {
    std::lock_guard guard(lock);
    std::uint64_t stop = start + memory->bytes;
    if (int failed = check_range(start, stop)) return failed;
    if (backed_anywhere(start, stop)) return fail(MISUSED, range_text(start, stop) + " is backed already, at least in part");
    PILOTLIGHT_TRY(driver().ctx_set_current(context));
    if (int failed = map(start, memory)) return failed;
    if (int failed = allow(start, stop)) {
        const std::string why = error_text();
        unmap(chunks_.find(start));
        return fail(failed, why);
    }
    return OK;
}

int Arena::unback(std::uint64_t start, std::uint64_t stop) {
    std::lock_guard guard(lock);
    if (int failed = check_range(start, stop)) return failed;
    if (!backed_everywhere(start, stop)) return fail(MISUSED, range_text(start, stop) + " is not backed everywhere");
    PILOTLIGHT_TRY(driver().ctx_set_current(context));
    // A kernel that still runs may read what is to go.
    PILOTLIGHT_TRY(driver().ctx_synchronize());
    std::vector<Rest> rests;
    std::vector<Chunk> gone;
    for (auto chunk = std::prev(chunks_.upper_bound(start)); chunk != chunks_.end() && chunk->second.start < stop; ++chunk) {
        if (chunk->second.start < start) rests.push_back({chunk->second.start, start, nullptr, {}});
        if (chunk->second.stop > stop) rests.push_back({stop, chunk->second.stop, nullptr, {}});
        gone.push_back(chunk->second);
    }
    // What stays is saved before anything is unmapped, and what was unmapped keeps its memory until all is done.
    for (Rest &rest : rests)
        if (int failed = save(std::prev(chunks_.upper_bound(rest.start))->second, &rest)) return failed;
    int failed = OK;
    std::size_t unmapped = 0, placed = 0;
    while (!failed && unmapped < gone.size())
        if (!(failed = unmap(chunks_.find(gone[unmapped].start)))) unmapped++;
    bool in_memory = true;
    for (const Rest &rest : rests) in_memory = in_memory && rest.memory;
    if (!failed && !in_memory) {
        // There is no way back: what stays needs the memory that goes.
        gone.clear();
        std::string why;
        for (Rest &rest : rests) {
            int refused = place(rest);
            if (!refused || failed) continue;
            failed = refused;
            why = error_text();
        }
        return failed ? fail(failed, why) : OK;
    }
    while (!failed && placed < rests.size())
        if (!(failed = place(rests[placed]))) placed++;
    if (!failed) return OK;
    const std::string why = error_text();
    while (placed) unmap(chunks_.find(rests[--placed].start));
    for (std::size_t index = 0; index < unmapped; index++) {
        const Chunk &chunk = gone[index];
        if (backed_anywhere(chunk.start, chunk.stop) || map(chunk.start, chunk.memory)) continue;
        if (allow(chunk.start, chunk.stop)) unmap(chunks_.find(chunk.start));
    }
    return fail(failed, why);
}

int Arena::detach(std::uint64_t start, std::uint64_t stop) {
    std::lock_guard guard(lock);
    PILOTLIGHT_TRY(driver().ctx_set_current(context));
    for (auto chunk = chunks_.lower_bound(start); chunk != chunks_.end() && chunk->second.stop <= stop;) {
        auto detached = chunk++;
        if (int failed = unmap(detached)) return failed;
    }
    return OK;
}

bool Arena::next_backed(std::uint64_t at, std::uint64_t *start, std::uint64_t *stop) const {
    auto chunk = chunks_.upper_bound(at);
    if (chunk != chunks_.begin() && std::prev(chunk)->second.stop > at) --chunk;
    if (chunk == chunks_.end()) return false;
    *start = std::max(at, chunk->second.start);
    for (*stop = chunk->second.stop; ++chunk != chunks_.end() && chunk->second.start == *stop;) *stop = chunk->second.stop;
    return true;
}

// Puts the contents of what stays of a chunk into memory of its own.
int Arena::save(const Chunk &chunk, Rest *rest) {
    // One more is the books' copy of the chunk, whose memory unback holds.
    if (chunk.memory.use_count() > 2 || chunk.memory->imported)
        return fail(MISUSED, range_text(chunk.start, chunk.stop) + " is shared, so it is taken away whole or not at all");
    int failed = create(rest->stop - rest->start, &rest->memory);
    if (!failed) failed = copy_out(rest->start, rest->memory);
    if (failed && failed != CUDA_ERROR_OUT_OF_MEMORY) return failed;
    if (failed) {
        // The device is full to the last granule: through the host, and into what the chunk gives back.
        rest->memory.reset();
        rest->saved.resize(rest->stop - rest->start);
        PILOTLIGHT_TRY(driver().memcpy_dtoh(rest->saved.data(), address + rest->start, rest->saved.size()));
    }
    counts.moved_bytes += rest->stop - rest->start;
    return OK;
}

// Puts what stays of a chunk where it was; nothing is there if that fails.
int Arena::place(Rest &rest) {
    if (!rest.memory)
        if (int failed = create(rest.stop - rest.start, &rest.memory)) return failed;
    if (int failed = map(rest.start, rest.memory)) return failed;
    int failed = allow(rest.start, rest.stop);
    if (!failed && !rest.saved.empty())
        failed = check(driver().memcpy_htod(address + rest.start, rest.saved.data(), rest.saved.size()), "driver().memcpy_htod");
    if (failed) {
        const std::string why = error_text();
        unmap(chunks_.find(rest.start));
        return fail(failed, why);
    }
    return OK;
}

// Copies what lies at a place into memory that is mapped nowhere yet.
int Arena::copy_out(std::uint64_t start, const Memory &memory) {
    CUdeviceptr window = 0;
    PILOTLIGHT_TRY(driver().mem_address_reserve(&window, memory->bytes, granule, 0, 0));
    int failed = check(driver().mem_map(window, memory->bytes, 0, memory->handle, 0), "driver().mem_map");
    if (!failed) {
        CUmemAccessDesc both{{1, ordinal_}, 3};
        failed = check(driver().mem_set_access(window, memory->bytes, &both, 1), "driver().mem_set_access");
        if (!failed) failed = check(driver().memcpy_dtod(window, address + start, memory->bytes), "driver().memcpy_dtod");
        // A copy within a device returns before it is done.
        if (!failed) failed = check(driver().ctx_synchronize(), "driver().ctx_synchronize");
        driver().mem_unmap(window, memory->bytes);
    }
    driver().mem_address_free(window, memory->bytes);
    return failed;
}

int Arena::share(std::uint64_t start, std::uint64_t stop, std::uint64_t from) {
    std::lock_guard guard(lock);
    if (int failed = check_range(start, stop)) return failed;
    if (backed_anywhere(start, stop)) return fail(MISUSED, range_text(start, stop) + " is backed already, at least in part");
    std::vector<std::pair<std::uint64_t, Memory>> pieces;
    for (std::uint64_t at = from; at < from + (stop - start);) {
        auto chunk = chunks_.find(at);
        if (chunk == chunks_.end() || chunk->second.stop > from + (stop - start))
            return fail(MISUSED, range_text(from, from + stop - start) + " is not made of whole chunks");
        pieces.emplace_back(start + (at - from), chunk->second.memory);
        at = chunk->second.stop;
    }
    for (std::size_t index = 0; index < pieces.size(); index++) {
        if (int failed = attach(pieces[index].first, pieces[index].second)) {
            const std::string why = error_text();
            for (std::size_t done = 0; done < index; done++) unmap(chunks_.find(pieces[done].first));
            return fail(failed, why);
        }
    }
    return OK;
}

int Arena::import(std::uint64_t start, std::uint64_t size, int fd) {
    std::lock_guard guard(lock);
    PILOTLIGHT_TRY(driver().ctx_set_current(context));
    CUmemHandle handle = 0;
    PILOTLIGHT_TRY(driver().mem_import(&handle, reinterpret_cast<void *>(static_cast<std::intptr_t>(fd)),
                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    return attach(start, std::make_shared<Physical>(handle, size, true, &physical_bytes));
}

int Arena::export_chunk(std::uint64_t offset, int *fd, std::uint64_t *start, std::uint64_t *stop) {
    std::lock_guard guard(lock);
    auto chunk = chunks_.upper_bound(offset);
    if (chunk == chunks_.begin() || std::prev(chunk)->second.stop <= offset)
        return fail(MISUSED, "no memory is behind " + std::to_string(offset));
    const Chunk &found = std::prev(chunk)->second;
    PILOTLIGHT_TRY(driver().ctx_set_current(context));
    PILOTLIGHT_TRY(driver().mem_export(fd, found.memory->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    *start = found.start;
    *stop = found.stop;
    return OK;
}

}  // namespace pilotlight

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

PILOTLIGHT_EXPORT void pilotlight_arena_close(Arena *arena) {
    end_pools(arena);
    delete arena;
}
PILOTLIGHT_EXPORT std::uint64_t pilotlight_arena_address(Arena *arena) { return arena->address; }
PILOTLIGHT_EXPORT std::uint64_t pilotlight_arena_granule(Arena *arena) { return arena->granule; }
PILOTLIGHT_EXPORT std::uint64_t pilotlight_arena_physical_bytes(Arena *arena) { return arena->physical_bytes; }
PILOTLIGHT_EXPORT void pilotlight_arena_counts(Arena *arena, Counts *counts) { *counts = arena->counts; }

PILOTLIGHT_EXPORT int pilotlight_arena_back(Arena *arena, std::uint64_t start, std::uint64_t stop, std::uint64_t chunk_bytes) {
    return arena->back(start, stop, chunk_bytes);
}
PILOTLIGHT_EXPORT int pilotlight_arena_unback(Arena *arena, std::uint64_t start, std::uint64_t stop) {
    return arena->unback(start, stop);
}
// The first backed bytes from `at` on: [start, stop), empty where there are none.
PILOTLIGHT_EXPORT void pilotlight_arena_next(Arena *arena, std::uint64_t at, std::uint64_t *start, std::uint64_t *stop) {
    std::lock_guard guard(arena->lock);
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
