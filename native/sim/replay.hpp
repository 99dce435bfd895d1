// Drives a Residency through a recorded trace, exactly as the recorded run drove its own.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "native/cache/residency.hpp"

namespace tierstore {

// Columns of a trace: one row per event; event i has units [offsets[i], offsets[i + 1]). They are those of Event
// (native/cache/observer.hpp).
struct TraceColumns {
    std::span<const std::uint8_t> kinds;
    std::span<const std::uint8_t> phases;
    std::span<const std::uint32_t> at;
    std::span<const std::uint32_t> layers;
    std::span<const std::uint64_t> offsets;  // one more than events
    std::span<const std::uint32_t> records;
    std::span<const std::uint16_t> flags;
};

// Runs the whole trace, or its pieces one after another: an access may continue in the next piece. Throws
// std::invalid_argument with the event's number if the core refuses an event.
class Replay {
public:
    // The residency has the trace's records except for the `late` ones, which ADD events add, in order.
    Replay(Residency& residency, std::vector<RecordInfo> late)
        : residency_(residency), first_late_(residency.record_count()), late_(std::move(late)) {}
    void run(const TraceColumns& trace);
    void finish();  // ends the open access

private:
    void apply(EventKind kind, Phase phase, std::uint32_t layer, std::span<const std::uint32_t> records,
               std::span<const std::uint16_t> flags);
    void advance_to(std::uint32_t at);
    void advance_unit_by_unit(std::uint32_t at);
    void end_group();
    void end_units(std::span<const std::uint32_t> units);
    void add(std::span<const std::uint32_t> records);

    Residency& residency_;
    std::uint32_t first_late_;
    std::vector<RecordInfo> late_;
    bool unit_by_unit_ = false;  // each unit ends by itself, as with a device's slots: there was a KEEP
    std::uint32_t group_ = 0;    // of the recorded run, in the open access
    std::uint64_t events_ = 0;
    Decided decided_;
    Decided ahead_;
};

}  // namespace tierstore
