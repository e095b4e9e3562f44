// Copies from the host's memory to the device, in a thread of its own.
//
//     orders    [ part 3: tensors )[ part 4: tensors )[ part 5 ...
//     units     [ 16 MiB )[ 16 MiB )[ 16 MiB )[ ...           several small copies are one unit, a large one is several
//     in flight           [ unit )[ unit )                     never more than two: whatever else wants the bus waits for no more;
//                                                              six of an order that is alone, so that the bus has some to do while
//                                                              another thread is in the driver
//
// What lies in pinned memory goes from where it is; what does not goes through a ring of pinned slabs, filled while the units before it are
// on their way.
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "driver.h"
#include "movers.h"

namespace pilotlight {

namespace {

struct Piece {
    const char *from;
    CUdeviceptr to;
    std::uint64_t bytes;
    bool pinned;
};

enum Manner { PLAIN, BACKGROUND, ALONE };  // as Python gives it

struct Order {
    std::uint64_t ticket;
    Manner manner;
    std::vector<Piece> pieces;
};

struct InFlight {
    std::uint64_t unit;
    CUevent event;
};

struct Issued {
    std::uint64_t ticket, last_unit;
};

constexpr std::uint64_t MAX_GAP_BYTES = 64;
constexpr std::size_t BACKGROUND_UNIT_BYTES = 4 << 20, ALONE_DEPTH = 6;

}  // namespace

class Copier {
  public:
    Copier(CUcontext context, std::uint64_t slab_bytes, int depth, int num_streams, int num_movers)
        : context_(context), slab_bytes_(slab_bytes), depth_(depth), num_streams_(num_streams), movers_(num_movers) {}

    int open() {
        PILOTLIGHT_TRY(driver().ctx_set_current(context_));
        int least = 0, greatest = 0;
        PILOTLIGHT_TRY(driver().ctx_get_stream_priority_range(&least, &greatest));
        // The last one is for what may wait.
        for (int index = 0; index <= num_streams_; index++) {
            CUstream stream = nullptr;
            PILOTLIGHT_TRY(driver().stream_create(&stream, CU_STREAM_NON_BLOCKING, index == num_streams_ ? least : greatest));
            streams_.push_back(stream);
        }
        for (std::size_t index = 0; index <= depth_; index++) {
            void *slab = nullptr;
            PILOTLIGHT_TRY(driver().mem_host_alloc(&slab, slab_bytes_, CU_MEMHOSTREGISTER_PORTABLE));
            slabs_.push_back(static_cast<char *>(slab));
        }
        for (std::size_t index = 0; index <= std::max(depth_, ALONE_DEPTH); index++) {
            CUevent event = nullptr;
            PILOTLIGHT_TRY(driver().event_create(&event, CU_EVENT_DISABLE_TIMING));
            events_.push_back(event);
        }
        thread_ = std::thread([this] { work(); });
        return OK;
    }

    ~Copier() {
        {
            std::lock_guard guard(lock_);
            stopping_ = true;
        }
        changed_.notify_all();
        if (thread_.joinable()) thread_.join();
        driver().ctx_set_current(context_);
        for (auto &flight : in_flight_) {
            driver().event_synchronize(flight.event);
            events_.push_back(flight.event);
        }
        for (CUevent event : events_) driver().event_destroy(event);
        for (CUstream stream : streams_) driver().stream_destroy(stream);
        for (char *slab : slabs_) driver().mem_free_host(slab);
        for (auto &[start, stop] : pinned_) driver().mem_host_unregister(reinterpret_cast<void *>(start));
    }

    int pin(std::uint64_t start, std::uint64_t bytes) {
        std::lock_guard guard(lock_);
        auto next = pinned_.upper_bound(start);
        if ((next != pinned_.end() && next->first < start + bytes) || (next != pinned_.begin() && std::prev(next)->second > start))
            return fail(MISUSED, "it is pinned already, at least in part");
        PILOTLIGHT_TRY(driver().ctx_set_current(context_));
        void *place = reinterpret_cast<void *>(start);
        // Memory that is mapped for reading alone takes the second form, and where the device has none goes through the ring.
        if (driver().mem_host_register(place, bytes, CU_MEMHOSTREGISTER_PORTABLE) != CUDA_SUCCESS)
            PILOTLIGHT_TRY(driver().mem_host_register(place, bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_READ_ONLY));
        pinned_[start] = start + bytes;
        return OK;
    }

    int unpin(std::uint64_t start) {
        std::unique_lock guard(lock_);
        auto range = pinned_.find(start);
        if (range == pinned_.end()) return fail(MISUSED, "nothing is pinned there");
        // What was ordered before may read it still.
        changed_.wait(guard, [this] { return failed_ || (orders_.empty() && !busy_ && in_flight_.empty()); });
        PILOTLIGHT_TRY(driver().ctx_set_current(context_));
        PILOTLIGHT_TRY(driver().mem_host_unregister(reinterpret_cast<void *>(start)));
        pinned_.erase(range);
        return OK;
    }

    std::uint64_t submit(const std::uint64_t *copies, int count, Manner manner) {
        Order order;
        order.manner = manner;
        {
            std::lock_guard guard(lock_);
            for (int index = 0; index < count; index++) add(order, copies[3 * index], copies[3 * index + 1], copies[3 * index + 2]);
            order.ticket = ++last_ticket_;
            orders_.push_back(std::move(order));
        }
        changed_.notify_all();
        return last_ticket_;
    }

    // Until everything of an order is on its way (done: has arrived). One that is too late is withdrawn: what of it is not on its way is
    // not copied any more, and its sources are not read, but by the device where they are pinned.
    int wait(std::uint64_t ticket, bool done, double seconds) {
        std::unique_lock guard(lock_);
        changed_.wait_for(guard, std::chrono::duration<double>(seconds), [&] {
            return failed_ || withdrawn_.count(ticket) || (done ? completed_ticket_ : issued_ticket_) >= ticket;
        });
        if (failed_) return fail(failed_, failure_);
        if (!withdrawn_.count(ticket) && (done ? completed_ticket_ : issued_ticket_) >= ticket) return OK;
        withdrawn_.insert(ticket);
        changed_.wait(guard, [&] { return moving_ != ticket; });
        return fail(TIMED_OUT, "an order of copies is not done in " + std::to_string(seconds) + " s, and is withdrawn");
    }

    // Whether a wait for an order would return at once.
    bool is_over(std::uint64_t ticket) {
        std::lock_guard guard(lock_);
        return failed_ || withdrawn_.count(ticket) || completed_ticket_ >= ticket;
    }

    // Work that comes to a stream from now on waits for an order that is on its way.
    int order_before(std::uint64_t ticket, CUstream stream, double seconds) {
        if (int failed = wait(ticket, false, seconds)) return failed;
        std::lock_guard guard(lock_);
        PILOTLIGHT_TRY(driver().ctx_set_current(context_));
        std::uint64_t last_unit = ~std::uint64_t(0);
        for (auto &issued : issued_)
            if (issued.ticket == ticket) last_unit = issued.last_unit;
        if (last_unit == ~std::uint64_t(0)) return OK;  // has arrived
        for (auto &flight : in_flight_)
            if (flight.unit <= last_unit) PILOTLIGHT_TRY(driver().stream_wait_event(stream, flight.event, 0));
        return OK;
    }

    void counts(std::uint64_t *units, std::uint64_t *direct_bytes, std::uint64_t *ring_bytes, std::uint64_t *calls) {
        std::lock_guard guard(lock_);
        *units = next_unit_;
        *direct_bytes = direct_bytes_;
        *ring_bytes = ring_bytes_;
        *calls = calls_;
    }

  private:
    // Joins a copy to the one before it where both lie side by side, here and there: what is between them is padding of both.
    void add(Order &order, std::uint64_t from, std::uint64_t to, std::uint64_t bytes) {
        while (bytes) {
            auto range = pinned_.upper_bound(from);
            bool pinned = range != pinned_.begin() && std::prev(range)->second > from;
            std::uint64_t stop = pinned ? std::prev(range)->second : range != pinned_.end() ? range->first : from + bytes;
            std::uint64_t now = std::min(bytes, stop - from);
            if (!order.pieces.empty()) {
                Piece &last = order.pieces.back();
                std::uint64_t end = reinterpret_cast<std::uint64_t>(last.from) + last.bytes;
                std::uint64_t gap = from - end;
                bool joined = last.pinned == pinned && from >= end && gap < MAX_GAP_BYTES && to == last.to + last.bytes + gap &&
                              (!pinned || reinterpret_cast<std::uint64_t>(last.from) >= std::prev(range)->first);
                if (joined) {
                    last.bytes += gap + now;
                    from += now, to += now, bytes -= now;
                    continue;
                }
            }
            order.pieces.push_back({reinterpret_cast<const char *>(from), to, now, pinned});
            from += now, to += now, bytes -= now;
        }
    }

    void work() {
        int failed = check(driver().ctx_set_current(context_), "driver().ctx_set_current");
        std::unique_lock guard(lock_);
        while (!failed) {
            if (orders_.empty() && !in_flight_.empty()) {
                failed = await_oldest(guard);
                continue;
            }
            changed_.wait(guard, [this] { return stopping_ || !orders_.empty(); });
            if (stopping_) return;
            Order order = std::move(orders_.front());
            orders_.pop_front();
            carried_out_ = order.ticket;
            busy_ = true;
            failed = carry_out(order, guard);
            busy_ = false;
            issued_ticket_ = order.ticket;
            issued_.push_back({order.ticket, next_unit_ - 1});
            if (in_flight_.empty()) settle();
            changed_.notify_all();
        }
        failed_ = failed;
        failure_ = error_text();
        changed_.notify_all();
    }

    int carry_out(const Order &order, std::unique_lock<std::mutex> &guard) {
        std::size_t unit_bytes = order.manner == BACKGROUND ? std::min<std::size_t>(BACKGROUND_UNIT_BYTES, slab_bytes_) : slab_bytes_;
        std::vector<Piece> unit;
        std::size_t filled = 0;
        for (const Piece &piece : order.pieces) {
            for (std::uint64_t done = 0; done < piece.bytes;) {
                std::uint64_t now = std::min<std::uint64_t>(piece.bytes - done, unit_bytes - filled);
                unit.push_back({piece.from + done, piece.to + done, now, piece.pinned});
                done += now;
                filled += now;
                if (filled == unit_bytes) {
                    if (stopping_ || withdrawn_.count(order.ticket)) return OK;
                    if (int failed = issue(unit, order.manner, guard)) return failed;
                    unit.clear();
                    filled = 0;
                }
            }
        }
        return unit.empty() || withdrawn_.count(order.ticket) ? OK : issue(unit, order.manner, guard);
    }

    int issue(const std::vector<Piece> &unit, Manner manner, std::unique_lock<std::mutex> &guard) {
        std::size_t limit = manner == BACKGROUND ? 1 : manner == ALONE ? std::max(depth_, ALONE_DEPTH) : depth_;
        bool pinned = true;
        for (const Piece &piece : unit) pinned = pinned && piece.pinned;
        if (!pinned) {
            // Then the last unit that went through the slab, which is as many before this one as there are slabs, has arrived.
            limit = std::min(limit, depth_);
            while (in_flight_.size() > depth_)
                if (int failed = await_oldest(guard)) return failed;
        }
        char *slab = slabs_[next_unit_ % slabs_.size()];
        std::vector<HostMove> moves;
        std::vector<Piece> sent;
        std::uint64_t used = 0;
        for (const Piece &piece : unit) {
            if (piece.pinned) {
                sent.push_back(piece);
                direct_bytes_ += piece.bytes;
                continue;
            }
            moves.push_back({slab + used, piece.from, piece.bytes});
            sent.push_back({slab + used, piece.to, piece.bytes, true});
            used += piece.bytes;
        }
        ring_bytes_ += used;
        if (!moves.empty()) {
            moving_ = carried_out_;
            guard.unlock();
            movers_.run(moves);
            guard.lock();
            moving_ = 0;
            changed_.notify_all();
        }
        while (in_flight_.size() >= limit)
            if (int failed = await_oldest(guard)) return failed;
        if (withdrawn_.count(carried_out_)) return OK;
        CUstream stream = manner == BACKGROUND ? streams_.back() : streams_[next_unit_ % num_streams_];
        for (const Piece &piece : sent) PILOTLIGHT_TRY(driver().memcpy_htod_async(piece.to, piece.from, piece.bytes, stream));
        calls_ += sent.size();
        CUevent event = events_.back();
        PILOTLIGHT_TRY(driver().event_record(event, stream));
        events_.pop_back();
        in_flight_.push_back({next_unit_++, event});
        return OK;
    }

    int await_oldest(std::unique_lock<std::mutex> &guard) {
        CUevent event = in_flight_.front().event;
        guard.unlock();
        int failed = check(driver().event_synchronize(event), "driver().event_synchronize");
        guard.lock();
        if (failed) return failed;
        events_.push_back(event);
        in_flight_.pop_front();
        settle();
        return OK;
    }

    // Notes which orders have arrived.
    void settle() {
        std::uint64_t arrived = in_flight_.empty() ? next_unit_ : in_flight_.front().unit;  // units [0, arrived) have
        bool any = false;
        while (!issued_.empty() && (issued_.front().last_unit + 1 <= arrived)) {
            completed_ticket_ = issued_.front().ticket;
            issued_.pop_front();
            any = true;
        }
        if (any || in_flight_.empty()) changed_.notify_all();
    }

    const CUcontext context_;
    const std::uint64_t slab_bytes_;
    const std::size_t depth_;
    const int num_streams_;
    Movers movers_;
    std::vector<CUstream> streams_;
    std::vector<char *> slabs_;
    std::vector<CUevent> events_;
    std::map<std::uint64_t, std::uint64_t> pinned_;  // start -> stop
    std::thread thread_;
    std::mutex lock_;
    std::condition_variable changed_;
    std::deque<Order> orders_;
    std::deque<InFlight> in_flight_;
    std::deque<Issued> issued_;
    std::set<std::uint64_t> withdrawn_;  // a ticket each time that the device was too slow, which ends an engine
    std::uint64_t carried_out_ = 0, moving_ = 0;  // the order under way, and the one whose sources are read now; 0: none
    std::uint64_t last_ticket_ = 0, issued_ticket_ = 0, completed_ticket_ = 0, next_unit_ = 0;
    std::uint64_t direct_bytes_ = 0, ring_bytes_ = 0, calls_ = 0;
    int failed_ = 0;
    std::string failure_;
    bool busy_ = false, stopping_ = false;
};

}  // namespace pilotlight

using namespace pilotlight;

PILOTLIGHT_EXPORT int pilotlight_copier_open(CUcontext context, std::uint64_t slab_bytes, int depth, int streams, int movers,
                                             Copier **copier) {
    if (!slab_bytes || depth < 1 || streams < 1 || movers < 1) return fail(MISUSED, "a copier has at least one of everything");
    auto made = std::make_unique<Copier>(context, slab_bytes, depth, streams, movers);
    if (int failed = made->open()) return failed;
    *copier = made.release();
    return OK;
}

PILOTLIGHT_EXPORT void pilotlight_copier_close(Copier *copier) { delete copier; }
PILOTLIGHT_EXPORT int pilotlight_copier_pin(Copier *copier, std::uint64_t start, std::uint64_t bytes) { return copier->pin(start, bytes); }
PILOTLIGHT_EXPORT int pilotlight_copier_unpin(Copier *copier, std::uint64_t start) { return copier->unpin(start); }

// `copies` is count times (from, to, bytes); the ticket is what the order is asked about by.
PILOTLIGHT_EXPORT std::uint64_t pilotlight_copier_submit(Copier *copier, const std::uint64_t *copies, int count, int manner) {
    return copier->submit(copies, count, static_cast<Manner>(manner));
}
PILOTLIGHT_EXPORT int pilotlight_copier_wait(Copier *copier, std::uint64_t ticket, double seconds) {
    return copier->wait(ticket, true, seconds);
}
PILOTLIGHT_EXPORT int pilotlight_copier_is_over(Copier *copier, std::uint64_t ticket) { return copier->is_over(ticket); }
PILOTLIGHT_EXPORT int pilotlight_copier_order_before(Copier *copier, std::uint64_t ticket, CUstream stream, double seconds) {
    return copier->order_before(ticket, stream, seconds);
}
PILOTLIGHT_EXPORT void pilotlight_copier_counts(Copier *copier, std::uint64_t *units, std::uint64_t *direct_bytes,
                                                std::uint64_t *ring_bytes, std::uint64_t *calls) {
    copier->counts(units, direct_bytes, ring_bytes, calls);
}
