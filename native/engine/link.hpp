// A link of limited speed, for machines whose own links are too fast, or missing, for what is to be studied.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

namespace tierstore {

// Transfers follow one another: each starts when it is asked for or when the one before has ended, whichever
// is later, and takes latency + nbytes / bandwidth. Nothing is moved or waited for here. Thread-safe.
class Link {
public:
    struct Slot {
        uint64_t start_ns;  // of CLOCK_MONOTONIC
        uint64_t end_ns;
    };

    // Bytes a second (infinity: no limit) and seconds. Throws std::invalid_argument unless they are positive,
    // and not negative and finite.
    Link(double bandwidth, double latency_s);

    double bandwidth() const { return bandwidth_; }
    double latency_s() const { return latency_s_; }

    // The time of a transfer that is asked for at `now_ns`.
    Slot reserve(size_t nbytes, uint64_t now_ns);

    struct Stats {
        uint64_t transfers = 0;
        uint64_t nbytes = 0;
        uint64_t busy_ns = 0;
    };
    Stats stats();

private:
    const double bandwidth_;
    const double latency_s_;
    std::mutex mutex_;  // guards what follows
    uint64_t free_at_ns_ = 0;
    Stats stats_;
};

}  // namespace tierstore
