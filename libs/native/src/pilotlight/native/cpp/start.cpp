// What a process that becomes an engine does of its first start while Python imports, in a thread from its first milliseconds on.
//
//     [ driver, context )[ addresses )[ memory )[ archive )[ kernels, graph )[ kernels, graph )...
//
// What is done is what the process before this one had in the end (the plan). Who attaches later says what it needs; a thing is handed over
// once, and only if it is that: an arena by its addresses, an archive by all of its bytes. The rest is given back.
//
// The host pool is not pinned here: the system's lock on the process's addresses that this takes makes imports a third of a second longer.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "../blake3/blake3.h"
#include "archive.h"
#include "arena.h"
#include "exports.h"
#include "graph_api.h"

namespace pilotlight {

// As Python gives it.
struct StartPlan {
    std::uint64_t plan_bytes;            // of this struct: a plan may name the library of another release
    const char *driver;
    std::uint64_t address, bytes;        // of the arena
    const std::uint64_t *ranges;         // (start, stop, longest chunk) of what of it gets memory
    std::uint64_t num_ranges;
    const char *archive;                 // a file; null: there is none
    std::uint64_t archive_bytes;
    std::uint8_t digest[BLAKE3_OUT_LEN];
    const std::uint64_t *sizes;          // of graphs, in the order in which they are made
    std::uint64_t num_sizes;
    int ordinal;
};

namespace {

enum Step { CONTEXT, ARENA, MEMORY, ARCHIVE, GRAPHS, NUM_STEPS };
constexpr int NOT_YET = 1 << 30;

std::uint64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

std::vector<std::uint64_t> copied(const std::uint64_t *first, std::uint64_t count) { return {first, first + count}; }

int system_error(const char *what, const std::string &path) { return fail(MISUSED, std::string(what) + " " + path + ": " + std::strerror(errno)); }

}  // namespace

class Start {
  public:
    explicit Start(const StartPlan &plan)
        : plan_(plan), driver_(plan.driver), archive_(plan.archive ? plan.archive : ""), ranges_(copied(plan.ranges, 3 * plan.num_ranges)),
          sizes_(copied(plan.sizes, plan.num_sizes)), begun_ns_(now_ns()) {
        results_.fill(NOT_YET);
        thread_ = std::thread([this] { work(); });
    }

    ~Start() {
        stop_ = true;
        if (thread_.joinable()) thread_.join();
        if (graphs_) pilotlight_archive_close(graphs_);
        if (arena_) pilotlight_arena_close(arena_, 1);
    }

    // What became of a step; TIMED_OUT: nothing yet.
    int wait(int step, double seconds) {
        if (step < 0 || step >= NUM_STEPS) return fail(MISUSED, "there is no such step");
        std::unique_lock guard(lock_);
        if (!changed_.wait_for(guard, std::chrono::duration<double>(seconds), [&] { return results_[step] != NOT_YET; }))
            return fail(TIMED_OUT, "the driver has not come to an end with it");
        return results_[step] ? fail(results_[step], why_[step]) : OK;
    }

    int take_arena(Arena **arena, std::uint64_t *free_bytes, double seconds) {
        if (wait(MEMORY, seconds) == TIMED_OUT) return TIMED_OUT;
        if (!arena_) return fail(MISUSED, "there is no arena, or it was taken");
        std::swap(*arena = nullptr, arena_);
        *free_bytes = free_bytes_;
        return OK;
    }

    // Makes no more graphs; those that are made are the archive's. Of another archive nothing is kept.
    int take_archive(const char *bytes, std::uint64_t size, Archive **archive, std::uint64_t *num_graphs, std::uint64_t *made) {
        stop_ = true;
        if (thread_.joinable()) thread_.join();
        if (!graphs_) return fail(MISUSED, "there is no archive, or it was taken");
        if (size != bytes_.size() || std::memcmp(bytes, bytes_.data(), size)) {
            // Another model was wanted first: what was made for this one is in its way.
            pilotlight_archive_close(graphs_);
            graphs_ = nullptr;
            return fail(MISUSED, "the archive is another one, and is given back");
        }
        std::swap(*archive = nullptr, graphs_);
        *num_graphs = num_graphs_;
        *made = made_;
        return OK;
    }

    // When each step ended, in nanoseconds since the beginning; 0: it did not.
    void times(std::uint64_t *ended_ns) {
        std::lock_guard guard(lock_);
        std::copy(ended_ns_.begin(), ended_ns_.end(), ended_ns);
    }

  private:
    // A step is over. What comes behind one that failed fails for the same reason.
    int ended(int step, int result) {
        std::lock_guard guard(lock_);
        results_[step] = result;
        if (result) why_[step] = error_text();
        ended_ns_[step] = now_ns() - begun_ns_;
        changed_.notify_all();
        return result;
    }

    void work() {
        int failed = ended(CONTEXT, open_context());
        failed = ended(ARENA, failed ? failed : open_arena());
        // From here on the arena may be taken; one without memory serves, too, and graphs need only its addresses.
        ended(MEMORY, failed ? failed : lay_memory_by());
        failed = ended(ARCHIVE, failed ? failed : open_archive());
        ended(GRAPHS, failed ? failed : make_graphs());
    }

    int open_context() {
        if (int failed = pilotlight_driver_open(driver_.c_str())) return failed;
        if (int failed = pilotlight_device_open(plan_.ordinal, &context_)) return failed;
        std::uint64_t total = 0;
        return pilotlight_device_memory(context_, &free_bytes_, &total);
    }

    int open_arena() { return pilotlight_arena_open(context_, plan_.ordinal, plan_.address, plan_.bytes, &arena_); }

    // Memory that lies where it will be used, idle: whoever backs those places asks the driver for nothing.
    int lay_memory_by() {
        std::uint64_t bytes = 0;
        for (std::size_t range = 0; range < ranges_.size(); range += 3) bytes += ranges_[range + 1] - ranges_[range];
        arena_->keep(bytes);
        for (std::size_t range = 0; range < ranges_.size(); range += 3)
            if (int failed = pilotlight_arena_back(arena_, &ranges_[range], 1, ranges_[range + 2])) return failed;
        for (std::size_t range = 0; range < ranges_.size(); range += 3)
            if (int failed = pilotlight_arena_unback(arena_, &ranges_[range], 1)) return failed;
        laid_by_ = true;
        return OK;
    }

    int open_archive() {
        if (archive_.empty()) return fail(MISUSED, "the plan has no archive");
        int file = open(archive_.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
        if (file < 0) return system_error("no archive", archive_);
        bytes_.resize(plan_.archive_bytes + 1);
        std::uint64_t size = 0;
        for (ssize_t more = 1; more > 0 && size < bytes_.size(); size += std::max<ssize_t>(more, 0))
            more = read(file, bytes_.data() + size, bytes_.size() - size);
        close(file);
        if (size != plan_.archive_bytes) return fail(MISUSED, "the archive has another size");
        bytes_.resize(size);
        std::array<std::uint8_t, BLAKE3_OUT_LEN> digest{};
        pilotlight_blake3(reinterpret_cast<const std::uint8_t *>(bytes_.data()), size, digest.data());
        if (std::memcmp(digest.data(), plan_.digest, digest.size())) return fail(MISUSED, "the archive has another digest");
        return pilotlight_archive_open(context_, bytes_.data(), size, plan_.address, &graphs_, &num_graphs_);
    }

    // Of a graph that copies or clears memory the driver wants to see that: where it is not there, only kernels are loaded.
    int make_graphs() {
        for (std::uint64_t size : sizes_) {
            std::uint32_t number = 0;
            while (number < num_graphs_ && pilotlight_archive_tag(graphs_, number) != size) number++;
            if (number == num_graphs_ || stop_) continue;
            if (int failed = pilotlight_archive_load(graphs_, number)) return failed;
            if (!finds_memory(number)) continue;
            for (std::uint64_t left = 1; left && !stop_;)
                if (int failed = pilotlight_archive_advance(graphs_, number, nullptr, &left)) return failed;
            if (!stop_) made_++;
        }
        return OK;
    }

    // Whether all that a graph copies or clears lies in planned memory.
    bool finds_memory(std::uint32_t number) const {
        Header header{};
        std::memcpy(&header, bytes_.data(), sizeof header);
        const GraphEntry &entry = reinterpret_cast<const GraphEntry *>(bytes_.data() + header.graphs)[number];
        auto *nodes = reinterpret_cast<const NodeEntry *>(bytes_.data() + entry.nodes);
        return std::all_of(nodes, nodes + entry.num_nodes, [&](const NodeEntry &node) {
            if (node.type == KERNEL || node.type == EMPTY) return true;
            const char *params = bytes_.data() + entry.parameters + node.params;
            for (std::uint32_t place = 0; place + 8 <= node.param_bytes; place += 8) {
                std::uint64_t word = 0;
                std::memcpy(&word, params + place, sizeof word);
                if (word - plan_.address < plan_.bytes && !is_planned(word - plan_.address)) return false;
            }
            return laid_by_;
        });
    }

    bool is_planned(std::uint64_t offset) const {
        for (std::size_t range = 0; range < ranges_.size(); range += 3)
            if (ranges_[range] <= offset && offset < ranges_[range + 1]) return true;
        return false;
    }

    const StartPlan plan_;
    const std::string driver_, archive_;
    const std::vector<std::uint64_t> ranges_, sizes_;
    const std::uint64_t begun_ns_;
    CUcontext context_ = nullptr;
    Arena *arena_ = nullptr;
    Archive *graphs_ = nullptr;
    bool laid_by_ = false;
    std::vector<char> bytes_;  // the archive's, which reads them for as long as it is open
    std::uint64_t free_bytes_ = 0, num_graphs_ = 0, made_ = 0;
    std::atomic<bool> stop_{false};
    std::mutex lock_;
    std::condition_variable changed_;
    std::array<int, NUM_STEPS> results_{};
    std::array<std::uint64_t, NUM_STEPS> ended_ns_{};
    std::array<std::string, NUM_STEPS> why_;
    std::thread thread_;
};

}  // namespace pilotlight

using namespace pilotlight;

// Begins; what the plan points to is copied. Its memory is given back by `end`, but an archive that was taken reads on: then it stays.
PILOTLIGHT_EXPORT int pilotlight_start_begin(const StartPlan *plan, Start **start) {
    if (plan->plan_bytes != sizeof *plan) return fail(MISUSED, "the plan is another release's");
    *start = new Start(*plan);
    return OK;
}
PILOTLIGHT_EXPORT int pilotlight_start_wait(Start *start, int step, double seconds) { return start->wait(step, seconds); }
PILOTLIGHT_EXPORT int pilotlight_start_take_arena(Start *start, Arena **arena, std::uint64_t *free_bytes, double seconds) {
    return start->take_arena(arena, free_bytes, seconds);
}
PILOTLIGHT_EXPORT int pilotlight_start_take_archive(Start *start, const char *bytes, std::uint64_t size, Archive **archive,
                                                    std::uint64_t *num_graphs, std::uint64_t *made) {
    return start->take_archive(bytes, size, archive, num_graphs, made);
}
PILOTLIGHT_EXPORT void pilotlight_start_times(Start *start, std::uint64_t *ended_ns) { start->times(ended_ns); }
PILOTLIGHT_EXPORT void pilotlight_start_end(Start *start) { delete start; }
