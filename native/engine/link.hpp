// A link of limited speed, for studies on machines whose own links are too fast or missing; and, with a burst, an
// allowance of bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

namespace tierstore {

// Transfers follow one another: each starts when it is requested or when the previous one has ended, whichever is
// later, and takes latency + nbytes / bandwidth. Nothing is moved or waited for here. Thread-safe.
//
// With a burst it is a token bucket: unused time is credit, at most the time of `burst_bytes`, and a transfer with
// enough credit ends at once. One that no caller waits for leaves half of the burst to those that are waited for: it ends
// later, when half is available again.
class Link {
public:
    struct Slot {
        uint64_t start_ns;  // of CLOCK_MONOTONIC
        uint64_t end_ns;
        uint64_t patient_end_ns;  // if no caller waits for it
    };

    // Bytes a second (infinity: no limit) and seconds. Throws std::invalid_argument unless the bandwidth is positive
    // and the latency finite and not negative. A burst needs a finite bandwidth.
    Link(double bandwidth, double latency_s, double burst_bytes = 0);

    double bandwidth() const { return bandwidth_; }
    double latency_s() const { return latency_s_; }

    // The time slot of a transfer requested at `now_ns`.
    Slot reserve(size_t nbytes, uint64_t now_ns);

    struct Stats {
        uint64_t transfers = 0;
        uint64_t nbytes = 0;
        uint64_t busy_ns = 0;
    };
    Stats stats();

    // Bytes of credit: at most the burst, negative if transfers are waited for.
    double level(uint64_t now_ns);
    // Sets the credit; at most the burst.
    void set_level(double nbytes, uint64_t now_ns);

    // Measures the time in which at least one transfer was waited for that only the link held back.
    void block(uint64_t now_ns);
    void unblock(uint64_t now_ns);
    uint64_t blocked_ns(uint64_t now_ns);

private:
    const double bandwidth_;
    const double latency_s_;
    const int64_t burst_ns_;
    std::mutex mutex_;        // guards what follows
    int64_t free_at_ns_ = 0;  // signed: credit may be older than the clock
    size_t blocking_ = 0;
    uint64_t blocking_since_ns_ = 0;
    uint64_t blocked_ns_ = 0;
    Stats stats_;
};

}  // namespace tierstore
