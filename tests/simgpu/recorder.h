// Writes down what the host has the device and the engine do, as a graph in program order: what each operation amounts
// to, and which earlier operations it follows. Times are those of this machine; others take the graph and time it anew.

#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace simgpu {

using Nodes = std::vector<int64_t>;

// An operation that `thread` queued or did. It follows `after`, and the thread's previous operations.
struct Node {
    std::string what;
    int thread;
    int64_t stream;  // HOST: the thread itself does it; ENGINE
    int64_t ticket;  // of the engine's; 0 for others
    double operations;
    uint64_t nbytes;
    Nodes after;
    int64_t begin_ns, end_ns;
};

constexpr int64_t HOST = -1, ENGINE = -2;

inline int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

class Recorder {
public:
    // Begins anew. What was queued before is done.
    void start() {
        std::lock_guard lock(mutex_);
        on_ = true;
        first_ += static_cast<int64_t>(nodes_.size());
        nodes_.clear();
        streams_.clear();
        tickets_.clear();
        known_.clear();
    }

    // The graph; nodes are named by their indices.
    std::vector<Node> stop() {
        std::lock_guard lock(mutex_);
        on_ = false;
        std::vector<Node> found = nodes_;
        for (Node& each : found) {
            std::erase_if(each.after, [&](int64_t before) { return before < first_; });
            for (int64_t& before : each.after) before -= first_;
        }
        return found;
    }

    bool on() {
        std::lock_guard lock(mutex_);
        return on_;
    }

    // An operation of the stream, behind all that it has, and behind the tickets of `follow`.
    Nodes launch(const std::string& what, int thread, int64_t stream, double operations, uint64_t nbytes,
                 int64_t begin_ns) {
        std::lock_guard lock(mutex_);
        if (!on_) return {};
        Nodes& last = streams_[stream];
        last.insert(last.end(), following_.begin(), following_.end());
        last = {add({what, thread, stream, 0, operations, nbytes, std::move(last), begin_ns, now_ns()})};
        return last;
    }

    // What an event holds that is recorded now.
    Nodes reached(int64_t stream) {
        std::lock_guard lock(mutex_);
        return streams_[stream];
    }

    void stream_waits(int64_t stream, const Nodes& before) {
        std::lock_guard lock(mutex_);
        Nodes& last = streams_[stream];
        if (on_) last.insert(last.end(), before.begin(), before.end());
    }

    // The thread waits for `before`, or only notes that it came here.
    void host(const std::string& what, int thread, const Nodes& before, int64_t begin_ns) {
        std::lock_guard lock(mutex_);
        if (!on_) return;
        known_[thread] = before;
        add({what, thread, HOST, 0, 0, 0, before, begin_ns, now_ns()});
    }

    void host_waits_for_streams(int thread, int64_t stream, int64_t begin_ns) {
        Nodes before;
        {
            std::lock_guard lock(mutex_);
            for (const auto& [each, last] : streams_)
                if (stream < 0 || each == stream) before.insert(before.end(), last.begin(), last.end());
        }
        host("sync", thread, before, begin_ns);
    }

    // Tickets of the engine. An external one follows what the thread waited for that completed it.
    void issue(const std::string& what, int thread, int engine, int64_t ticket,
               const std::vector<int64_t>& after, uint64_t nbytes, int64_t begin_ns) {
        std::lock_guard lock(mutex_);
        if (!on_) return;
        tickets_[{engine, ticket}] =
            add({what, thread, ENGINE, ticket, 0, nbytes, of(engine, after), begin_ns, now_ns()});
    }

    void complete(int thread, int engine, int64_t ticket) {
        std::lock_guard lock(mutex_);
        auto found = tickets_.find({engine, ticket});
        if (!on_ || found == tickets_.end()) return;
        Nodes& after = nodes_[static_cast<size_t>(found->second - first_)].after;
        after.insert(after.end(), known_[thread].begin(), known_[thread].end());
    }

    void host_waits_for_tickets(int thread, int engine, const std::vector<int64_t>& tickets,
                                int64_t begin_ns) {
        Nodes before;
        {
            std::lock_guard lock(mutex_);
            before = of(engine, tickets);
        }
        host("wait", thread, before, begin_ns);
    }

    // What this thread launches follows the tickets, until it is called again: none.
    void follow(int engine, const std::vector<int64_t>& tickets) {
        std::lock_guard lock(mutex_);
        following_ = of(engine, tickets);
    }

private:
    int64_t add(Node node) {
        nodes_.push_back(std::move(node));
        return first_ + static_cast<int64_t>(nodes_.size()) - 1;
    }

    Nodes of(int engine, const std::vector<int64_t>& tickets) {
        Nodes nodes;
        for (int64_t each : tickets)
            if (auto found = tickets_.find({engine, each}); found != tickets_.end())
                nodes.push_back(found->second);
        return nodes;
    }

    std::mutex mutex_;
    bool on_ = false;
    std::vector<Node> nodes_;
    int64_t first_ = 0;  // number of the first node: events may hold those of earlier recordings
    std::map<int64_t, Nodes> streams_;  // what the next operation of each follows
    std::map<std::pair<int, int64_t>, int64_t> tickets_;
    std::map<int, Nodes> known_;  // what each thread waited for last
    static inline thread_local Nodes following_;
};

// The one recorder of the process.
Recorder& recorder();

}  // namespace simgpu
