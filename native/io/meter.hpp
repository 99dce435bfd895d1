// The speed of a drive while it works: bytes moved, and the time in which anything was in flight.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>

namespace tierstore {

// Transfers overlap, so their service times cannot be summed: `busy_ns` is the length of their union. Thread-safe.
class Meter {
public:
    struct Reading {
        uint64_t read_bytes = 0;
        uint64_t written_bytes = 0;
        uint64_t busy_ns = 0;
    };

    void read(uint64_t nbytes, uint64_t start_ns, uint64_t end_ns) { add(nbytes, 0, start_ns, end_ns); }
    void wrote(uint64_t nbytes, uint64_t start_ns, uint64_t end_ns) { add(0, nbytes, start_ns, end_ns); }

    // Totals since it was created.
    Reading reading();

private:
    struct Busy {
        uint64_t start_ns;
        uint64_t end_ns;
    };

    void add(uint64_t read, uint64_t written, uint64_t start_ns, uint64_t end_ns);

    std::mutex mutex_;  // guards what follows
    Reading total_;
    std::deque<Busy> recent_;  // disjoint, in order: the last intervals, which a late transfer may overlap
};

}  // namespace tierstore
