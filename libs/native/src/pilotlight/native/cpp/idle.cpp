// Memory of an arena that is in use no longer: what becomes of it, and the thread that does what nothing waits for.
#include <algorithm>
#include <chrono>
#include <system_error>

#include "arena.h"

namespace pilotlight {

namespace {

constexpr std::chrono::seconds TURN_DEADLINE{10};
thread_local bool behind = false;  // in an arena's thread

std::uint64_t nanoseconds() {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

}  // namespace

Counted::Counted(Books &books, Call call) : books_(books), call_(call), start_(nanoseconds()) {}

Counted::~Counted() {
    books_.calls[call_]++;
    books_.nanoseconds[behind ? BEHIND : call_] += nanoseconds() - start_;
}

Physical::Physical(CUmemHandle handle, std::uint64_t bytes, bool imported,
                   std::shared_ptr<Books> books)
    : handle(handle), bytes(bytes), imported(imported), books(std::move(books)) {
    this->books->physical_bytes += bytes;
}

Physical::~Physical() {
    Counted counted(*books, RELEASE);
    driver().mem_release(handle);
    (idle ? books->idle_bytes : books->physical_bytes) -= bytes;
}

Arena::Turn::Turn(Arena &arena) : arena_(arena) {
    arena.waiting_++;
    held_ = std::unique_lock(arena.lock_, TURN_DEADLINE);
    arena.waiting_--;
    if (!held_) failed = fail(TIMED_OUT, "the driver has not come back from the arena's last call");
}

Arena::Turn::~Turn() {
    if (held_) arena_.refused_ = false;
    if (held_ && arena_.has_chores() && !arena_.thread_.joinable()) {
        try {
            arena_.thread_ = std::thread([arena = &arena_] { arena->work(); });
        } catch (const std::system_error &) {
            // Places stay mapped until they are needed.
        }
    }
    if (held_) held_.unlock();
    arena_.changed_.notify_one();
}

// Whether it may serve others when nothing here uses it any more.
bool Arena::keepable(const Physical &memory) const {
    return memory.places <= 1 && !memory.imported && !memory.exported &&
           memory.bytes <= most_idle_bytes_;
}

void Arena::lay_by(const Memory &memory) {
    memory->idle = true;
    books->physical_bytes -= memory->bytes;
    books->idle_bytes += memory->bytes;
    idle_.emplace(memory->bytes, memory);
}

// Memory that is mapped nowhere; what is not kept goes back to the driver with its last reference.
void Arena::lay_by_or_drop(const Memory &memory) {
    if (!memory->places && keepable(*memory)) {
        lay_by(memory);
    } else {
        drop(memory);
    }
}

// Stale places would keep memory that nothing uses until the thread comes to them, and it is neither idle nor in use. A place that the
// driver refuses to unmap is left to the thread.
void Arena::drop(const Memory &memory) {
    if (!memory->places) unmap_stale_of(memory);
}

// A chunk in use becomes a stale one, and its memory idle: no call of the driver.
void Arena::retire(const Chunk &chunk) {
    const Chunk retired = chunk;
    chunks_.erase(retired.start);
    retired.memory->places--;
    retired.memory->stale_places++;
    stale_[retired.start] = retired;
    lay_by(retired.memory);
}

// The other way round, if a stale chunk begins there, ends in time, and its memory is idle still.
bool Arena::resume(std::uint64_t at, std::uint64_t stop) {
    const auto stale = stale_.find(at);
    if (stale == stale_.end() || stale->second.stop > stop || !stale->second.memory->idle) return false;
    const Chunk chunk = stale->second;
    auto [idle, last] = idle_.equal_range(chunk.memory->bytes);
    idle = std::find_if(idle, last, [&](const auto &each) { return each.second == chunk.memory; });
    idle_.erase(idle);
    chunk.memory->idle = false;
    books->idle_bytes -= chunk.memory->bytes;
    books->physical_bytes += chunk.memory->bytes;
    stale_.erase(stale);
    chunk.memory->stale_places--;
    chunk.memory->places++;
    chunks_[at] = chunk;
    return true;
}

// The longest idle memory within these lengths, from now on in use; null, if there is none. Its old place is unmapped first: drivers
// have refused to map memory that a stale place had still, with errors that say nothing.
int Arena::reuse(std::uint64_t at_least, std::uint64_t at_most, Memory *memory) {
    *memory = nullptr;
    auto found = idle_.upper_bound(at_most);
    if (found == idle_.begin() || (--found)->first < at_least) return OK;
    if (int failed = unmap_stale_of(found->second)) return failed;
    *memory = found->second;
    idle_.erase(found);
    (*memory)->idle = false;
    books->idle_bytes -= (*memory)->bytes;
    books->physical_bytes += (*memory)->bytes;
    return OK;
}

// Where the first stale chunk from `at` on begins; `stop`, if none does before.
std::uint64_t Arena::next_stale(std::uint64_t at, std::uint64_t stop) const {
    const auto stale = stale_.lower_bound(at);
    return stale == stale_.end() ? stop : std::min(stop, stale->first);
}

// Unmaps what of [start, stop) is stale, but for chunks that can be resumed within it.
int Arena::clear(std::uint64_t start, std::uint64_t stop, bool resumable_too) {
    auto stale = stale_.upper_bound(start);
    if (stale != stale_.begin()) --stale;
    while (stale != stale_.end() && stale->first < stop) {
        const Chunk &chunk = stale->second;
        const bool resumable = chunk.start >= start && chunk.stop <= stop && chunk.memory->idle;
        const auto next = std::next(stale);
        if (chunk.stop > start && (resumable_too || !resumable))
            if (int failed = unmap_stale(stale)) return failed;
        stale = next;
    }
    return OK;
}

int Arena::unmap_stale(Chunks::iterator stale) {
    const Chunk &chunk = stale->second;
    {
        Counted counted(*books, UNMAP);
        PILOTLIGHT_TRY(driver().mem_unmap(address + chunk.start, chunk.stop - chunk.start));
    }
    chunk.memory->stale_places--;
    stale_.erase(stale);
    return OK;
}

int Arena::unmap_stale_of(const Memory &memory) {
    for (auto stale = stale_.begin(); memory->stale_places; ) {
        const auto next = std::next(stale);
        if (stale->second.memory == memory)
            if (int failed = unmap_stale(stale)) return failed;
        stale = next;
    }
    return OK;
}

// Short ones first: they are of the least use to others.
int Arena::release_shortest() {
    const Memory memory = idle_.begin()->second;
    if (int failed = unmap_stale_of(memory)) return failed;
    idle_.erase(idle_.begin());
    return OK;
}

int Arena::shed(std::uint64_t idle_bytes) {
    while (books->idle_bytes > idle_bytes)
        if (int failed = release_shortest()) return failed;
    return OK;
}

void Arena::keep(std::uint64_t most_idle_bytes) {
    most_idle_bytes_ = most_idle_bytes;
    if (books->idle_bytes > most_idle_bytes) Turn(*this);  // Its end wakes the thread.
}

int Arena::settle(std::uint64_t idle_bytes) {
    Turn turn(*this);
    if (turn.failed) return turn.failed;
    PILOTLIGHT_TRY(driver().ctx_set_current(context));
    if (int failed = clear(0, bytes, true)) return failed;
    return shed(idle_bytes);
}

bool Arena::has_chores() const { return books->idle_bytes > most_idle_bytes_; }

// One call of the driver at a time, while nothing else wants a turn. A refusal is no error of anybody's: the place stays mapped,
// which is tried again with the next turn, and by what needs the place.
void Arena::work() {
    behind = true;
    driver().ctx_set_current(context);
    // Other threads may capture meanwhile.
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    driver().thread_exchange_stream_capture_mode(&mode);
    std::unique_lock held(lock_);
    while (!closing_) {
        changed_.wait(held, [this] { return closing_ || (!waiting_ && !refused_ && has_chores()); });
        if (closing_) return;
        refused_ = release_shortest();
        held.unlock();
        held.lock();
    }
}

}  // namespace pilotlight
