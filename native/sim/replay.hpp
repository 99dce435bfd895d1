// Drives a Residency through a recorded trace, exactly as the run that was recorded drove its own.
#pragma once

#include <cstdint>
#include <span>

#include "native/cache/residency.hpp"

namespace tierstore {

// What the core was told, in program order. The units of an event are what the comment says.
enum class TraceEvent : std::uint8_t {
    ACCESS,      // an access: its records with their flags
    PREFETCH,    // records with their flags
    CANCEL,      // cancel_prefetch()
    CLEAN,       // records, flags unused
    CLEAN_ALL,   // none
    DROP,        // entries, flags unused
    SET_STORED,  // records, and their masks as flags
    PIN,         // records with their flags
    UNPIN,       // records with their flags
    END_UNIT,    // units of the open group (by index in their access) that ended before what follows
    END_STEP,    // none
};
inline constexpr std::uint8_t kTraceEvents = 11;

// Columns of a trace: one row an event; event i has units [offsets[i], offsets[i + 1]).
// `at` says where inside an access an event fell: 0 outside any; 2g + 1 when g groups had been begun and the
// last of them had ended; 2g when group g (counted from 1) was open.
struct TraceColumns {
    std::span<const std::uint8_t> kinds;
    std::span<const std::uint8_t> phases;
    std::span<const std::uint32_t> at;
    std::span<const std::uint32_t> layers;
    std::span<const std::uint64_t> offsets;  // one more than events
    std::span<const std::uint32_t> records;
    std::span<const std::uint16_t> flags;
};

// Runs the whole of the trace, or one piece of it after another: an access may go on in the next piece.
// Throws std::invalid_argument, naming the event's number, for what the core refuses.
class Replay {
public:
    explicit Replay(Residency& residency) : residency_(residency) {}
    void run(const TraceColumns& trace);
    void finish();  // ends the access that is open

private:
    void apply(TraceEvent kind, Phase phase, std::uint32_t layer, std::span<const std::uint32_t> records,
               std::span<const std::uint16_t> flags);
    void advance_to(std::uint32_t at);
    void end_group();
    void end_units(std::span<const std::uint32_t> units);

    Residency& residency_;
    std::uint64_t events_ = 0;
    std::vector<std::uint8_t> ended_;
    Decided decided_;
    Decided ahead_;
};

}  // namespace tierstore
