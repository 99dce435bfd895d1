// The fast simulator: one cache policy over columns of requests, without keeping decisions. It drives the same policy
// objects that a live store runs, and counts what a Residency would count on the same accesses.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "native/cache/residency.hpp"

namespace tierstore {

// ATOMIC: an event's entries are one set, none of which evicts another; a set that does not fit is split into the
// largest groups that do, by GroupOrder (GIVEN is the order of keys), and never between entries of one record.
// SEQUENTIAL: each entry is a request of its own.
enum class Contract : std::uint8_t { ATOMIC, SEQUENTIAL };

// An entry that no cache of this size can hold, or not together with the rest of its record that is requested at once:
// REFUSE throws CapacityError, as a live store does; BYPASS counts a miss that is not admitted, and writes through.
enum class Oversized : std::uint8_t { REFUSE, BYPASS };

// What is counted besides the totals: by step and layer, or by event as well.
enum class Detail : std::uint8_t { STEPS, EVENTS };

// Event i requests entries [offsets[i], offsets[i + 1]). Only `offsets` and `entries` are needed; the comment of each
// other column ends with its default, which an empty column means.
struct RequestColumns {
    std::span<const std::uint64_t> offsets{};   // one more than events
    std::span<const EntryId> entries{};         // by request
    std::span<const std::uint8_t> writes{};     // by request: non-zero makes dirty; none does
    std::span<const std::uint32_t> layers{};    // by event; the layer of its first entry
    std::span<const std::uint8_t> phases{};     // by event; Phase::FORWARD
    std::span<const std::uint32_t> steps{};     // by event, non-decreasing; one step
    std::span<const std::uint32_t> sizes{};     // by entry, in frames, at least 1; 1
    std::span<const std::uint32_t> layer_of{};  // by entry; the layer of the first event that requests it
    std::span<const std::uint32_t> records{};   // by entry: its record; each has its own
    std::span<const std::uint8_t> groups{};  // by entry: its group in its record; its place among neighbours
    std::span<const std::uint64_t> bytes{};  // by entry; its frames
    std::span<const std::uint8_t> pinned{};  // by entry: non-zero never leaves once resident; none is
    std::span<const std::uint8_t> requesters{};  // by request: the requesting sequences, a bit each; unknown
    std::size_t events() const { return offsets.empty() ? 0 : offsets.size() - 1; }
};

struct SimulationOptions {
    std::string policy = "lru";  // or one of bound_names()
    PolicyOptions policy_options{};
    PolicyFactory make = &make_policy;
    std::uint64_t capacity_frames = 0;
    Scope scope = Scope::GLOBAL;
    std::vector<std::uint64_t> layer_quotas{};  // with LAYER: frames of each, in sum at most the capacity
    Contract contract = Contract::ATOMIC;
    GroupOrder order = GroupOrder::RESIDENT_FIRST;
    Oversized oversized = Oversized::REFUSE;
    std::uint64_t warmup_events = 0;  // executed, but not counted anywhere
    Detail detail = Detail::STEPS;
};

struct SimulationCounts {
    std::uint64_t requests = 0, hits = 0, misses = 0, evictions = 0, write_backs = 0;
    std::uint64_t missed_frames = 0, written_frames = 0, missed_bytes = 0, written_bytes = 0, starved = 0;
    std::uint64_t not_admitted = 0;  // of the misses: too large, see Oversized
};

struct SimulationResult {
    SimulationCounts counts;
    // By step, in order of appearance.
    std::vector<std::uint64_t> step_requests, step_misses, step_write_backs;
    // By event; empty unless the detail is EVENTS.
    std::vector<std::uint64_t> event_missed_bytes, event_written_bytes;
    std::vector<std::uint32_t> event_misses, event_write_backs;
    // By layer; empty if no column has layers.
    std::vector<std::uint64_t> layer_hits, layer_misses;
};

// The bounds, which know the future requests: "belady" (every requested entry is admitted), "belady-bypass" (it need
// not be), see belady.hpp, and "unbounded" (each entry misses once, whatever the capacity). They take no options. No
// policy misses less than "unbounded", nor than the others with entries of one size (and, for "belady", sets that
// fit).
std::vector<std::string> bound_names();

// Throws std::invalid_argument that names the column for inconsistent columns, for a duplicate entry in one atomic
// event, and for whatever make_policy refuses; CapacityError if pinned entries, or (see Oversized) what must be
// resident at once, do not fit.
SimulationResult simulate(const RequestColumns& requests, const SimulationOptions& options);

}  // namespace tierstore
