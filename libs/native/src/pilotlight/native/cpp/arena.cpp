#include "arena.h"

#include <algorithm>
#include <cstdlib>

namespace pilotlight {

namespace {

// Idle memory shorter than this part of what it is for is not used: nothing may come to be made of ever shorter pieces.
constexpr std::uint64_t LEAST_SHARE = 8;

}  // namespace

std::string range_text(std::uint64_t start, std::uint64_t stop) {
    return "[" + std::to_string(start) + ", " + std::to_string(stop) + ")";
}

Arena::Arena(CUcontext context, int ordinal, std::uint64_t address, std::uint64_t bytes, std::uint64_t granule, bool rdma)
    : context(context), address(address), bytes(bytes), granule(granule), ordinal_(ordinal), rdma_(rdma) {}

Arena::~Arena() {
    if (thread_.joinable()) {
        {
            std::lock_guard guard(lock_);
            closing_ = true;
        }
        changed_.notify_all();
        thread_.join();
    }
    driver().ctx_set_current(context);
    if (!done) driver().ctx_synchronize();
    for (const Chunks *mapped : {&chunks_, &stale_})
        for (auto &[start, chunk] : *mapped) driver().mem_unmap(address + start, chunk.stop - chunk.start);
    chunks_.clear();
    stale_.clear();
    idle_.clear();
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

// Memory of this very length: idle, or new. A full device is told to take idle memory back first.
int Arena::obtain(std::uint64_t size, Memory *memory) {
    if (int failed = reuse(size, size, memory)) return failed;
    if (*memory) return OK;
    CUmemAllocationProp wanted = properties();
    CUmemHandle handle = 0;
    for (;;) {
        CUresult result;
        {
            Counted counted(*books, CREATE);
            result = driver().mem_create(&handle, size, &wanted, 0);
        }
        if (result == CUDA_SUCCESS) break;
        if (result != CUDA_ERROR_OUT_OF_MEMORY || idle_.empty()) return check(result, "driver().mem_create");
        if (int failed = shed(books->idle_bytes - std::min<std::uint64_t>(books->idle_bytes, size))) return failed;
    }
    *memory = std::make_shared<Physical>(handle, size, false, books);
    return OK;
}

int Arena::create(std::uint64_t size, Memory *memory) {
    Turn turn(*this);
    return turn.failed ? turn.failed : obtain(size, memory);
}

int Arena::map(std::uint64_t start, const Memory &memory) {
    Counted counted(*books, MAP);
    PILOTLIGHT_TRY(driver().mem_map(address + start, memory->bytes, 0, memory->handle, 0));
    chunks_[start] = Chunk{start, start + memory->bytes, memory};
    memory->places++;
    return OK;
}

int Arena::allow(std::uint64_t start, std::uint64_t stop) {
    CUmemAccessDesc both{{1, ordinal_}, 3};
    Counted counted(*books, ACCESS);
    return check(driver().mem_set_access(address + start, stop - start, &both, 1), "driver().mem_set_access");
}

// Whole chunks without a gap, in one call.
int Arena::unmap(std::uint64_t start, std::uint64_t stop) {
    {
        Counted counted(*books, UNMAP);
        PILOTLIGHT_TRY(driver().mem_unmap(address + start, stop - start));
    }
    const auto first = chunks_.lower_bound(start), last = chunks_.lower_bound(stop);
    for (auto chunk = first; chunk != last; ++chunk) chunk->second.memory->places--;
    chunks_.erase(first, last);
    return OK;
}

// Whole granules in order, none of which has memory.
int Arena::check_bare(const std::vector<Range> &ranges) const {
    std::uint64_t before = 0;
    for (auto [start, stop] : ranges) {
        if (int failed = check_range(start, stop)) return failed;
        if (start < before) return fail(MISUSED, range_text(start, stop) + " is not behind the range before it");
        if (backed_anywhere(start, stop)) return fail(MISUSED, range_text(start, stop) + " is backed already, at least in part");
        before = stop;
    }
    return OK;
}

// Maps memory behind a range, and adds what has no access yet to `runs`; one that goes on where the last one ends, to that.
int Arena::fill(std::uint64_t start, std::uint64_t stop, std::uint64_t chunk_bytes, std::vector<Range> &runs) {
    if (int failed = clear(start, stop, false)) return failed;
    for (std::uint64_t at = start; at < stop;) {
        if (resume(at, stop)) {
            at = chunks_[at].stop;
            continue;
        }
        const std::uint64_t room = std::min(next_stale(at, stop) - at, chunk_bytes);
        Memory memory;
        int failed = reuse(room / LEAST_SHARE, room, &memory);
        if (!failed && !memory) failed = obtain(room, &memory);
        if (!failed) failed = map(at, memory);
        if (failed && memory) lay_by_or_drop(memory);
        if (failed) return failed;
        if (runs.empty() || runs.back().stop != at) runs.push_back({at, at});
        at = runs.back().stop = at + memory->bytes;
    }
    return OK;
}

int Arena::back(const std::vector<Range> &ranges, std::uint64_t chunk_bytes) {
    Turn turn(*this);
    if (turn.failed) return turn.failed;
    if (chunk_bytes < granule || chunk_bytes % granule) return fail(MISUSED, "a chunk is made of whole granules");
    if (int failed = check_bare(ranges)) return failed;
    PILOTLIGHT_TRY(driver().ctx_set_current(context));
    int failed = OK;
    std::vector<Range> runs;
    for (auto range = ranges.begin(); range != ranges.end() && !failed; ++range) failed = fill(range->start, range->stop, chunk_bytes, runs);
    for (auto run = runs.begin(); run != runs.end() && !failed; ++run) failed = allow(run->start, run->stop);
    if (!failed) return OK;
    const std::string why = error_text();
    for (const Range &range : ranges)
        for (auto chunk = chunks_.lower_bound(range.start); chunk != chunks_.end() && chunk->first < range.stop;) {
            const Chunk undone = (chunk++)->second;
            if (!unmap(undone.start, undone.stop)) lay_by_or_drop(undone.memory);
        }
    return fail(failed, why);
}

// Maps given memory where nothing is, one piece behind the other; all or nothing.
int Arena::put(std::uint64_t start, const std::vector<Memory> &memories) {
    std::uint64_t stop = start;
    for (const Memory &memory : memories) stop += memory->bytes;
    if (int failed = check_bare({{start, stop}})) return failed;
    PILOTLIGHT_TRY(driver().ctx_set_current(context));
    if (int failed = clear(start, stop, true)) return failed;
    std::uint64_t at = start;
    int failed = OK;
    for (auto memory = memories.begin(); memory != memories.end() && !failed; ++memory)
        if (!(failed = map(at, *memory))) at += (*memory)->bytes;
    if (!failed) failed = allow(start, stop);
    if (!failed) return OK;
    const std::string why = error_text();
    if (start < at) unmap(start, at);
    return fail(failed, why);
}

int Arena::attach(std::uint64_t start, const std::vector<Memory> &memories) {
    Turn turn(*this);
    return turn.failed ? turn.failed : put(start, memories);
}

int Arena::unback(const std::vector<Range> &ranges) {
    Turn turn(*this);
    if (turn.failed) return turn.failed;
    std::uint64_t before = 0;
    for (const Range &range : ranges) {
        if (int failed = check_range(range.start, range.stop)) return failed;
        if (range.start < before) return fail(MISUSED, range_text(range.start, range.stop) + " is not behind the range before it");
        if (!backed_everywhere(range.start, range.stop))
            return fail(MISUSED, range_text(range.start, range.stop) + " is not backed everywhere");
        before = range.stop;
    }
    PILOTLIGHT_TRY(driver().ctx_set_current(context));
    {
        // A kernel that still runs may read what is to go.
        Counted counted(*books, WAIT);
        PILOTLIGHT_TRY(driver().ctx_synchronize());
    }
    std::vector<Rest> rests;
    std::vector<Chunk> gone, whole;
    for (auto [start, stop] : ranges) {
        for (auto chunk = std::prev(chunks_.upper_bound(start)); chunk != chunks_.end() && chunk->second.start < stop; ++chunk) {
            if (start <= chunk->second.start && chunk->second.stop <= stop && keepable(*chunk->second.memory)) {
                whole.push_back(chunk->second);
                continue;
            }
            if (gone.empty() || gone.back().start != chunk->second.start) {
                gone.push_back(chunk->second);
                if (chunk->second.start < start) rests.push_back({chunk->second.start, start, nullptr, {}});
            } else if ((rests.back().stop = start) == rests.back().start) {
                rests.pop_back();  // The range before it cuts the same chunk, and nothing stays between them.
            }
            if (chunk->second.stop > stop) rests.push_back({stop, chunk->second.stop, nullptr, {}});
        }
    }
    // What stays is saved before anything is unmapped, and what was unmapped keeps its memory until all is done.
    if (int failed = save(rests)) return failed;
    int failed = OK;
    std::size_t unmapped = 0, placed = 0;
    while (!failed && unmapped < gone.size()) {
        std::size_t last = unmapped + 1;
        while (last < gone.size() && gone[last].start == gone[last - 1].stop) last++;
        if (!(failed = unmap(gone[unmapped].start, gone[last - 1].stop))) unmapped = last;
    }
    bool in_memory = true;
    for (const Rest &rest : rests) in_memory = in_memory && rest.memory;
    if (!failed && !in_memory) {
        // There is no way back: what stays needs the memory that goes.
        for (const Chunk &chunk : whole) retire(chunk);
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
    if (!failed) {
        for (const Chunk &chunk : whole) retire(chunk);
        for (const Chunk &chunk : gone) lay_by_or_drop(chunk.memory);
        return OK;
    }
    const std::string why = error_text();
    while (placed--) unmap(rests[placed].start, rests[placed].stop);
    for (std::size_t index = 0; index < unmapped; index++) {
        const Chunk &chunk = gone[index];
        if (backed_anywhere(chunk.start, chunk.stop) || map(chunk.start, chunk.memory)) continue;
        if (allow(chunk.start, chunk.stop)) unmap(chunk.start, chunk.stop);
    }
    return fail(failed, why);
}

int Arena::detach(std::uint64_t start, std::uint64_t stop) {
    Turn turn(*this);
    if (turn.failed) return turn.failed;
    PILOTLIGHT_TRY(driver().ctx_set_current(context));
    for (auto chunk = chunks_.lower_bound(start); chunk != chunks_.end() && chunk->second.stop <= stop;) {
        const Chunk detached = (chunk++)->second;
        if (int failed = unmap(detached.start, detached.stop)) return failed;
        drop(detached.memory);
    }
    return OK;
}

bool Arena::next_backed(std::uint64_t at, std::uint64_t *start, std::uint64_t *stop) {
    std::lock_guard guard(lock_);
    auto chunk = chunks_.upper_bound(at);
    if (chunk != chunks_.begin() && std::prev(chunk)->second.stop > at) --chunk;
    if (chunk == chunks_.end()) return false;
    *start = std::max(at, chunk->second.start);
    for (*stop = chunk->second.stop; ++chunk != chunks_.end() && chunk->second.start == *stop;) *stop = chunk->second.stop;
    return true;
}

int Arena::share(std::uint64_t start, std::uint64_t stop, std::uint64_t from) {
    Turn turn(*this);
    if (turn.failed) return turn.failed;
    if (int failed = check_range(start, stop)) return failed;
    if (backed_anywhere(start, stop)) return fail(MISUSED, range_text(start, stop) + " is backed already, at least in part");
    std::vector<Memory> pieces;
    for (std::uint64_t at = from; at < from + (stop - start);) {
        auto chunk = chunks_.find(at);
        if (chunk == chunks_.end() || chunk->second.stop > from + (stop - start))
            return fail(MISUSED, range_text(from, from + stop - start) + " is not made of whole chunks");
        pieces.push_back(chunk->second.memory);
        at = chunk->second.stop;
    }
    return put(start, pieces);
}

int Arena::import(std::uint64_t start, std::uint64_t size, int fd) {
    Turn turn(*this);
    if (turn.failed) return turn.failed;
    PILOTLIGHT_TRY(driver().ctx_set_current(context));
    CUmemHandle handle = 0;
    PILOTLIGHT_TRY(driver().mem_import(&handle, reinterpret_cast<void *>(static_cast<std::intptr_t>(fd)),
                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    return put(start, {std::make_shared<Physical>(handle, size, true, books)});
}

int Arena::export_chunk(std::uint64_t offset, int *fd, std::uint64_t *start, std::uint64_t *stop) {
    Turn turn(*this);
    if (turn.failed) return turn.failed;
    auto chunk = chunks_.upper_bound(offset);
    if (chunk == chunks_.begin() || std::prev(chunk)->second.stop <= offset)
        return fail(MISUSED, "no memory is behind " + std::to_string(offset));
    const Chunk &found = std::prev(chunk)->second;
    PILOTLIGHT_TRY(driver().ctx_set_current(context));
    PILOTLIGHT_TRY(driver().mem_export(fd, found.memory->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    found.memory->exported = true;
    *start = found.start;
    *stop = found.stop;
    return OK;
}

}  // namespace pilotlight
