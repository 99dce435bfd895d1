// The calls of a residency core, in program order: enough to repeat them on another core.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "native/cache/policy.hpp"

namespace tierstore {

inline constexpr std::uint32_t kGroups = 3;  // weights, moments, gradients

// What the core knows about a record. `stored`: the mask of groups that had a backing copy when it was added.
struct RecordInfo {
    std::uint32_t layer;
    std::array<std::uint32_t, kGroups> frames;
    std::array<std::uint64_t, kGroups> bytes;
    std::uint16_t stored;
};

// The numbers are those of a trace file (docs/TRACES.md).
enum class EventKind : std::uint8_t {
    ACCESS,      // an access: its records with their flags
    PREFETCH,    // records with their flags
    CANCEL,      // cancel_prefetch()
    CLEAN,       // records, flags unused
    CLEAN_ALL,   // none
    DROP,        // entries, flags unused
    SET_STORED,  // records, and their masks as flags
    PIN,         // records with their flags
    UNPIN,       // records with their flags
    END_UNIT,    // units of the open group (by index in their access) that ended before the next event
    END_STEP,    // none; its step is the one that begins
    ADD,         // added records, flags unused
    KEEP,        // records with their flags
    RELEASE,     // records with their flags
};
inline constexpr std::uint8_t kEventKinds = 14;

struct Event {
    EventKind kind;
    Phase phase = Phase::INIT;  // of ACCESS and PREFETCH, as the layer
    std::uint32_t layer = 0;
    // Where inside an access the event happened: 0 outside any; 2g + 1 when g groups had begun and the last of them had
    // ended; 2g when group g (counted from 1) was open.
    std::uint32_t at = 0;
    std::uint32_t step = 0;
    std::span<const std::uint32_t> records = {};
    std::span<const std::uint16_t> flags = {};  // empty where they are unused
    const RecordInfo* added = nullptr;          // of ADD
};

// Sees each successful call of a core. The spans are valid only during the call.
class ResidencyObserver {
public:
    virtual ~ResidencyObserver() = default;
    // Called before an access, a prefetch or the end of a step, while nothing has changed: an exception refuses the
    // event.
    virtual void before_event() = 0;
    virtual void on_event(const Event& event) = 0;
};

}  // namespace tierstore
