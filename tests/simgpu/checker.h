// Happens-before between host threads, streams and tickets, and the accesses that nothing orders.
//
// Each host thread and each stream is a timeline with a vector clock. A launch joins its thread's clock into its
// stream's; an event carries a stream's clock to another stream or to a thread. A ticket has the clock of what it
// follows and a place on a lane of tickets: a lane is a chain, so there are as many lanes as tickets are in flight
// at once, not as many as there are tickets. Memory is noted page by page. Knows nothing of torch.
//
// Every method takes the one mutex for a moment and calls nothing of torch's or Python's meanwhile.

#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace simgpu {

using Clock = std::vector<uint64_t>;
using SharedClock = std::shared_ptr<const Clock>;

inline void join(Clock& into, const Clock& other) {
    if (into.size() < other.size()) into.resize(other.size());
    for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

inline uint64_t component(const Clock& clock, int timeline) {
    return timeline < static_cast<int>(clock.size()) ? clock[timeline] : 0;
}

// Whether all that `earlier` has seen, `later` has seen.
inline bool covers(const Clock& later, const Clock& earlier) {
    for (size_t i = 0; i < earlier.size(); ++i)
        if (component(later, static_cast<int>(i)) < earlier[i]) return false;
    return true;
}

enum class Mode { READ, WRITE };

// What an operation does to `nbytes` bytes from `begin`.
struct Span {
    uintptr_t begin;
    size_t nbytes;
    Mode mode;
};

class Checker {
public:
    // Timelines -----------------------------------------------------------------------------------------------

    // This thread has a timeline of its own from now on. Threads that never call it (autograd's) belong to the main
    // thread's, which waits while they work.
    void enter_thread(const std::string& name) {
        std::lock_guard lock(mutex_);
        thread_ = add_timeline("thread " + name);
    }

    // A number of this thread's timeline; -1 for the main thread's.
    static int thread() { return thread_; }

    // Work queued on a stream: what this thread has seen, the work has seen. Returns the clock of the work.
    Clock launch(int device, int64_t stream, const std::string& what, const std::vector<Span>& spans) {
        std::lock_guard lock(mutex_);
        const int line = enqueue(device, stream);
        touch(line, timelines_[line].clock, what, spans);
        return timelines_[line].clock;
    }

    // Further accesses of the work that was queued last on the stream.
    void note(int device, int64_t stream, const std::string& what, const std::vector<Span>& spans) {
        std::lock_guard lock(mutex_);
        const int line = stream_line(device, stream);
        touch(line, timelines_[line].clock, what, spans);
    }

    // Accesses by this thread itself.
    void note_host(const std::string& what, const std::vector<Span>& spans) {
        std::lock_guard lock(mutex_);
        tick(host());
        touch(host(), timelines_[host()].clock, what, spans);
    }

    // What is queued on the stream from now on follows `before`.
    void stream_waits(int device, int64_t stream, const Clock& before) {
        std::lock_guard lock(mutex_);
        join(timelines_[enqueue(device, stream)].clock, before);
    }

    // This thread waits for all that is queued on the stream (all of the device's with stream -1).
    void host_waits(int device, int64_t stream) {
        std::lock_guard lock(mutex_);
        for (auto& [key, line] : streams_)
            if (key.first == device && (stream < 0 || key.second == stream))
                join(timelines_[host()].clock, timelines_[line].clock);
        tick(host());
    }

    void host_acquires(const Clock& clock) {
        std::lock_guard lock(mutex_);
        join(timelines_[host()].clock, clock);
        tick(host());
    }

    // What this thread has seen, for another to acquire.
    Clock host_releases() {
        std::lock_guard lock(mutex_);
        Clock seen = timelines_[host()].clock;
        tick(host());
        return seen;
    }

    bool host_has_seen(const Clock& clock) {
        std::lock_guard lock(mutex_);
        return covers(timelines_[host()].clock, clock);
    }

    // Tickets -------------------------------------------------------------------------------------------------

    // An operation that follows this thread and `after`. An external one is done when `complete` has been called.
    void issue(int engine, int64_t ticket, const std::vector<int64_t>& after, bool external,
               const std::string& what, std::vector<Span> spans) {
        std::lock_guard lock(mutex_);
        Pending made{{engine, ticket}, timelines_[host()].clock, {}, external, what, std::move(spans)};
        tick(host());
        for (int64_t each : after) made.after.push_back({engine, each});
        pending_.push_back(std::move(made));
        resolve();
    }

    void complete(int engine, int64_t ticket) {
        std::lock_guard lock(mutex_);
        for (Pending& each : pending_)
            if (each.ticket == Ticket{engine, ticket}) {
                each.external = false;
                join(each.start, timelines_[host()].clock);
            }
        tick(host());
        resolve();
    }

    // This thread knows that the tickets are done.
    void host_knows(int engine, const std::vector<int64_t>& tickets) {
        std::lock_guard lock(mutex_);
        for (int64_t each : tickets)
            if (auto found = done_.find({engine, each}); found != done_.end())
                join(timelines_[host()].clock, *found->second);
        tick(host());
    }

    // The engine is closed: all of its tickets are done, and its memory may be freed.
    void close_engine(int engine) {
        std::lock_guard lock(mutex_);
        for (Pending& each : pending_)
            if (each.ticket.first == engine) each.external = false;
        resolve();
        for (auto each = done_.lower_bound({engine, 0});
             each != done_.end() && each->first.first == engine;) {
            join(timelines_[host()].clock, *each->second);
            each = done_.erase(each);
        }
        tick(host());
    }

    // Memory --------------------------------------------------------------------------------------------------

    // Pinned host memory, which copies read and write while the host goes on. False where part of it is pinned already.
    bool pin(uintptr_t begin, size_t nbytes) {
        std::lock_guard lock(mutex_);
        auto next = pinned_.lower_bound(begin);
        if (next != pinned_.end() && next->first < begin + nbytes) return false;
        if (next != pinned_.begin()) {
            auto before = std::prev(next);
            if (before->first + before->second > begin) return false;
        }
        pinned_[begin] = nbytes;
        return true;
    }

    // False where no pinned memory begins there. A copy of it that this thread has not waited for is a violation. The
    // engine's threads may go on: registered or not, the memory is there for them.
    bool unpin(uintptr_t begin) {
        std::lock_guard lock(mutex_);
        auto found = pinned_.find(begin);
        if (found == pinned_.end()) return false;
        tick(host());
        for (uintptr_t page = begin / PAGE; page * PAGE < begin + found->second; ++page)
            if (auto accesses = pages_.find(page); accesses != pages_.end())
                std::erase_if(accesses->second, [&](const Access& each) {
                    return std::find(lanes_.begin(), lanes_.end(), each.line) != lanes_.end();
                });
        touch(host(), timelines_[host()].clock, "unpin", {{begin, found->second, Mode::WRITE}});
        drop(begin, found->second);
        pinned_.erase(found);
        return true;
    }

    bool is_pinned(uintptr_t address) {
        std::lock_guard lock(mutex_);
        auto next = pinned_.upper_bound(address);
        if (next == pinned_.begin()) return false;
        --next;
        return address < next->first + next->second;
    }

    // Whether any access of it has been noted.
    bool is_known(uintptr_t address) {
        std::lock_guard lock(mutex_);
        return pages_.count(address / PAGE) != 0;
    }

    // The memory is freed, and may come back as another.
    void forget(uintptr_t begin, size_t nbytes) {
        std::lock_guard lock(mutex_);
        drop(begin, nbytes);
    }

    // Results -------------------------------------------------------------------------------------------------

    void count(const std::string& what, uint64_t by = 1) {
        std::lock_guard lock(mutex_);
        counts_[what] += by;
    }

    std::map<std::string, uint64_t> counts() {
        std::lock_guard lock(mutex_);
        return counts_;
    }

    std::map<std::string, uint64_t> violations() {
        std::lock_guard lock(mutex_);
        return violations_;
    }

    void reset() {
        std::lock_guard lock(mutex_);
        counts_.clear();
        violations_.clear();
    }

private:
    static constexpr uintptr_t PAGE = 4096;
    using Ticket = std::pair<int, int64_t>;

    struct Timeline {
        Clock clock;
        std::string name;
    };

    struct Access {
        uintptr_t begin, end;
        int line;
        uint64_t at;
        SharedClock clock;
        Mode mode;
        std::shared_ptr<const std::string> what;
    };

    struct Pending {
        Ticket ticket;
        Clock start;
        std::vector<Ticket> after;
        bool external;
        std::string what;
        std::vector<Span> spans;
    };

    int add_timeline(const std::string& name) {
        const int line = static_cast<int>(timelines_.size());
        timelines_.push_back({Clock(line + 1), name});
        timelines_[line].clock[line] = 1;
        return line;
    }

    int host() {
        if (thread_ >= 0) return thread_;
        if (main_ < 0) main_ = add_timeline("the main thread");
        return main_;
    }

    int stream_line(int device, int64_t stream) {
        auto [found, made] = streams_.try_emplace({device, stream}, 0);
        if (made)
            found->second =
                add_timeline("stream " + std::to_string(stream) + " of device " + std::to_string(device));
        return found->second;
    }

    int enqueue(int device, int64_t stream) {
        const int line = stream_line(device, stream), thread = host();
        tick(thread);
        join(timelines_[line].clock, timelines_[thread].clock);
        tick(line);
        return line;
    }

    void tick(int line) {
        Clock& clock = timelines_[line].clock;
        if (static_cast<int>(clock.size()) <= line) clock.resize(line + 1);
        ++clock[line];
    }

    // Gives their clocks to tickets whose predecessors have theirs.
    void resolve() {
        for (bool again = true; again;) {
            again = false;
            for (auto each = pending_.begin(); each != pending_.end();) {
                const bool waits =
                    each->external ||
                    std::any_of(each->after.begin(), each->after.end(), [&](const Ticket& before) {
                        return std::any_of(pending_.begin(), pending_.end(),
                                           [&](const Pending& p) { return p.ticket == before; });
                    });
                if (waits) {
                    ++each;
                    continue;
                }
                finish(*each);
                each = pending_.erase(each);
                again = true;
            }
        }
    }

    void finish(const Pending& ticket) {
        Clock clock = ticket.start;
        for (const Ticket& before : ticket.after)
            if (auto found = done_.find(before); found != done_.end()) join(clock, *found->second);
        if (!ticket.spans.empty()) {
            auto lane = std::find_if(lanes_.begin(), lanes_.end(), [&](int line) {
                return component(clock, line) == timelines_[line].clock[line];
            });
            const int line = lane != lanes_.end() ? *lane : lanes_.emplace_back(add_timeline("the engine"));
            tick(line);
            if (static_cast<int>(clock.size()) <= line) clock.resize(line + 1);
            clock[line] = timelines_[line].clock[line];
            touch(line, clock, ticket.what, ticket.spans);
        }
        done_[ticket.ticket] = std::make_shared<const Clock>(std::move(clock));
    }

    void touch(int line, const Clock& now, const std::string& what, const std::vector<Span>& spans) {
        if (spans.empty()) return;
        const auto clock = std::make_shared<const Clock>(now);
        const auto name = std::make_shared<const std::string>(what);
        for (const Span& span : spans) {
            const uintptr_t end = span.begin + span.nbytes;
            for (uintptr_t begin = span.begin; begin < end;) {
                const uintptr_t page = begin / PAGE, until = std::min(end, (page + 1) * PAGE);
                touch_page(pages_[page], {begin, until, line, component(now, line), clock, span.mode, name});
                begin = until;
            }
        }
    }

    void touch_page(std::vector<Access>& accesses, const Access& now) {
        // An access may be noted late: a ticket behind an external one has its clock when that one is complete.
        size_t kept = 0;
        for (size_t i = 0; i < accesses.size(); ++i) {
            Access& before = accesses[i];
            const bool overlap = before.begin < now.end && now.begin < before.end;
            const bool writes = before.mode == Mode::WRITE || now.mode == Mode::WRITE;
            const bool earlier = component(*now.clock, before.line) >= before.at;
            const bool later = component(*before.clock, now.line) >= now.at;
            if (overlap && writes && !earlier && !later && before.clock != now.clock) report(before, now);
            const bool inside = now.begin <= before.begin && before.end <= now.end;
            const bool replaced =
                inside && earlier &&
                (now.mode == Mode::WRITE || (before.mode == Mode::READ && before.line == now.line));
            if (!replaced) {
                if (kept != i) accesses[kept] = std::move(before);
                ++kept;
            }
        }
        accesses.resize(kept);
        accesses.push_back(now);
    }

    void report(const Access& before, const Access& now) {
        const auto said = [&](const Access& each) {
            return *each.what + (each.mode == Mode::WRITE ? " writes" : " reads") + " on " +
                   timelines_[each.line].name;
        };
        ++violations_[said(now) + ", unordered with: " + said(before)];
    }

    void drop(uintptr_t begin, size_t nbytes) {
        for (uintptr_t page = begin / PAGE; page * PAGE < begin + nbytes; ++page) pages_.erase(page);
    }

    std::mutex mutex_;
    std::vector<Timeline> timelines_;
    std::map<std::pair<int, int64_t>, int> streams_;
    std::vector<int> lanes_;
    std::vector<Pending> pending_;
    std::map<Ticket, SharedClock> done_;
    std::unordered_map<uintptr_t, std::vector<Access>> pages_;
    std::map<uintptr_t, size_t> pinned_;
    std::map<std::string, uint64_t> counts_, violations_;
    int main_ = -1;
    static inline thread_local int thread_ = -1;
};

// The one checker of the process.
Checker& checker();

}  // namespace simgpu
