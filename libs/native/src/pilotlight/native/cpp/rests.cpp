// What stays of a chunk of which a part is taken away: saved, and put where it was.
#include "arena.h"

namespace pilotlight {

// Puts the contents of what stays of chunks into memory of its own.
int Arena::save(std::vector<Rest> &rests) {
    if (rests.empty()) return OK;
    for (Rest &rest : rests) {
        const Chunk &chunk = std::prev(chunks_.upper_bound(rest.start))->second;
        if (chunk.memory->places > 1 || chunk.memory->imported)
            return fail(MISUSED, range_text(chunk.start, chunk.stop) + " is shared, so it is taken away whole or not at all");
    }
    for (Rest &rest : rests) {
        int failed = obtain(rest.stop - rest.start, &rest.memory);
        if (failed && failed != CUDA_ERROR_OUT_OF_MEMORY) return failed;
    }
    int failed;
    {
        Counted counted(*books, COPY);
        failed = copy_out(rests);
    }
    if (failed && failed != CUDA_ERROR_OUT_OF_MEMORY) return failed;
    for (Rest &rest : rests) {
        books->moved_bytes += rest.stop - rest.start;
        if (failed) rest.memory.reset();
        if (rest.memory) continue;
        // The device is full to the last granule: through the host, and into what the chunk gives back.
        rest.saved.resize(rest.stop - rest.start);
        PILOTLIGHT_TRY(driver().memcpy_dtoh(rest.saved.data(), address + rest.start, rest.saved.size()));
    }
    return OK;
}

// Puts what stays of a chunk where it was; nothing is there if that fails.
int Arena::place(Rest &rest) {
    if (!rest.memory)
        if (int failed = obtain(rest.stop - rest.start, &rest.memory)) return failed;
    if (int failed = map(rest.start, rest.memory)) return failed;
    int failed = allow(rest.start, rest.stop);
    if (!failed && !rest.saved.empty())
        failed = check(driver().memcpy_htod(address + rest.start, rest.saved.data(), rest.saved.size()), "driver().memcpy_htod");
    if (failed) {
        const std::string why = error_text();
        unmap(rest.start, rest.stop);
        return fail(failed, why);
    }
    return OK;
}

// Copies what stays into its new memory, as far as it has any, which is mapped nowhere yet: by one window over all of it.
int Arena::copy_out(const std::vector<Rest> &rests) {
    std::uint64_t window_bytes = 0, mapped = 0;
    for (const Rest &rest : rests)
        if (rest.memory) window_bytes += rest.memory->bytes;
    if (!window_bytes) return OK;
    CUdeviceptr window = 0;
    PILOTLIGHT_TRY(driver().mem_address_reserve(&window, window_bytes, granule, 0, 0));
    int failed = OK;
    for (const Rest &rest : rests) {
        if (!rest.memory) continue;
        failed = check(driver().mem_map(window + mapped, rest.memory->bytes, 0, rest.memory->handle, 0), "driver().mem_map");
        if (failed) break;
        mapped += rest.memory->bytes;
    }
    if (!failed) {
        CUmemAccessDesc both{{1, ordinal_}, 3};
        failed = check(driver().mem_set_access(window, window_bytes, &both, 1), "driver().mem_set_access");
    }
    CUdeviceptr to = window;
    for (const Rest &rest : rests) {
        if (failed || !rest.memory) continue;
        failed = check(driver().memcpy_dtod(to, address + rest.start, rest.memory->bytes), "driver().memcpy_dtod");
        to += rest.memory->bytes;
    }
    // A copy within a device returns before it is done.
    if (!failed) failed = check(driver().ctx_synchronize(), "driver().ctx_synchronize");
    if (mapped) driver().mem_unmap(window, mapped);
    driver().mem_address_free(window, window_bytes);
    return failed;
}

}  // namespace pilotlight
