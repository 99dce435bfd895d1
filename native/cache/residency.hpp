// Which records are resident: every decision of the host cache, taken in program order. It counts frames and knows
// neither memory nor I/O, so a replay drives the same object that a live store runs.
//
// An entry is one section group of one record. Its state (Flag, and the pins and kHeld of busy_):
//
//             means                          set by                               cleared by
//   RESIDENT  has frames                     next_group, prefetch                 eviction, drop
//   DIRTY     newer than its backing copy    end_unit, end_group, unpin           write-back (clean, eviction), drop
//   STORED    has a backing copy             add_record, set_stored, write-back   set_stored, drop
//   pinned    in use; a count                next_group, pin, keep                end_unit, end_group, unpin, release
//   KEPT      one pin is keep()'s            keep                                 release
//   on hold   for a coming access            prefetch, next_group (later groups)  its request, cancel_prefetch, end_step
//   FRESH     prefetched, not requested yet  prefetch, next_group (later groups)  its request
//   KNOWN     the policy knows it            its request, or the end of its hold  eviction, drop
//
// Pinned entries and those on hold are *busy*: no policy may evict them. If a demanded group would not fit, the newest
// holds are evicted all the same. Leaving memory, by eviction or drop, clears everything but STORED. A DeviceCache
// (tierstore/prefetch/device_cache.py) pins what a pass finds in its slots by keep(); Action.KEEP, of a gradient, and a
// commit's Keep are other things.
//
// An access is one atomic event: the records that one layer needs at one moment. None of its entries evicts another.
// If it does not fit, it is split into the largest groups that do, each atomic: residents first, so that no group
// evicts what a later one needs. A pass that changes records takes smaller groups (`parts`): the moments that it is done
// with can leave while the rest of its layer is computed, and need no room beside them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "native/cache/observer.hpp"
#include "native/cache/policy.hpp"

namespace tierstore {

inline constexpr std::uint32_t kGradients = 2;  // of kGroups

enum class Decision : std::uint8_t {
    HIT,          // resident already
    FETCH,        // read its backing copy
    CREATE,       // no backing copy: no read
    EVICT,        // clean: free its frames
    EVICT_WRITE,  // write it back, then free its frames
    WRITE_BACK,   // write it back; it stays, clean
    DROP,         // discard it, resident or not, and its backing copy
};

enum class Scope : std::uint8_t { GLOBAL, LAYER };

// The order in which an access that takes several groups is cut into them. RESIDENT_FIRST: units whose entries are all
// resident, then those with some resident, then the rest, each in record order. KEY: in record order, which does not
// depend on the cache's content. GIVEN: as the access lists its records, which need not be ascending.
enum class GroupOrder : std::uint8_t { RESIDENT_FIRST, KEY, GIVEN };

// What counts as a step for the policies.
//  - STEPS: what ends with end_step().
//  - ACCESSES: each access, since otherwise no time would pass, except those of Phase::INIT and Phase::OPTIMIZER. The
//    step ends with the access's last group. From the first end_step() on, steps are as with STEPS.
//  - LATE_ACCESSES: like ACCESSES, but the first accesses, as many as there are records, are not steps. For a store that
//    cannot know whether its user will call end_step(): one who does so before that sees no difference from STEPS.
enum class StepClock : std::uint8_t { STEPS, ACCESSES, LATE_ACCESSES };

// Flags of a unit: what an access does with one record. `dirty` and `drop` only for groups that it needs.
inline constexpr std::uint16_t kNeedShift = 0, kDirtyShift = 3, kDropShift = 6;
// Above them, in an access: the sequences of a batch that request the record, a bit each (the caller numbers them).
inline constexpr std::uint16_t kSequencesShift = 9;
inline constexpr std::uint16_t kGroupMask = 7;

struct Decided {
    std::vector<std::uint8_t> kinds;
    std::vector<EntryId> entries;
    void add(Decision kind, EntryId entry) {
        kinds.push_back(static_cast<std::uint8_t>(kind));
        entries.push_back(entry);
    }
    void clear() {
        kinds.clear();
        entries.clear();
    }
};

// The frames of the capacity (or of a layer's quota) cannot hold what must be resident at once.
class CapacityError : public std::invalid_argument {
public:
    CapacityError(std::uint64_t needed, std::uint64_t available);
    std::uint64_t needed_frames() const { return needed_; }

private:
    std::uint64_t needed_;
};

struct HitCounts {
    std::uint64_t hits = 0;    // needed and resident (including in flight and on hold) when requested
    std::uint64_t misses = 0;  // needed and read
    bool operator==(const HitCounts&) const = default;
};

struct ResidencyStats {
    std::uint64_t hits = 0, misses = 0, creates = 0, evictions = 0, write_backs = 0, drops = 0;
    std::uint64_t read_bytes = 0, written_bytes = 0;  // read_bytes counts prefetched bytes too
    std::uint64_t prefetch_read_bytes = 0, useful_prefetch_bytes = 0, wasted_prefetch_bytes = 0;
    std::uint64_t prefetch_reads = 0;  // entries; the other reads are misses
    std::uint64_t starved = 0, groups = 0, accesses = 0, steps = 0;
    std::array<HitCounts, kGroups> by_group{};
    std::vector<HitCounts> by_layer;
    bool operator==(const ResidencyStats&) const = default;
};

struct ResidencyOptions {
    std::uint64_t capacity_frames = 0;
    std::uint64_t lookahead_frames = 0;  // the most that prefetched, unused entries may occupy
    Scope scope = Scope::GLOBAL;
    std::vector<std::uint64_t> layer_quotas;  // with LAYER: frames of each layer, in sum at most the capacity
    GroupOrder order = GroupOrder::RESIDENT_FIRST;
    StepClock clock = StepClock::STEPS;
    // A group of a pass (Phase::FORWARD, BACKWARD) that changes records takes at most this fraction of the capacity or
    // quota (1 / parts), or one record.
    std::uint32_t parts = 1;
    std::string policy = "lfu-decay";
    PolicyOptions policy_options;
    PolicyFactory make = &make_policy;
};

struct EntryState {
    bool resident, dirty, stored, held;
    std::uint32_t pins;
};

// One thread at a time. Calls throw std::invalid_argument for bad arguments and std::logic_error for calls out of
// order, before anything changes.
class Residency {
public:
    explicit Residency(const ResidencyOptions& options);
    Residency(const Residency&) = delete;
    Residency& operator=(const Residency&) = delete;

    // From now on `observer` sees the core's calls; null: none. Call before there are records.
    void observe(std::shared_ptr<ResidencyObserver> observer);
    // Numbers the steps from `step` on. Call before any other call.
    void start_at(std::uint32_t step);

    std::uint32_t add_record(const RecordInfo& record);
    void set_stored(std::uint32_t record, std::uint16_t mask);

    // Opens an access; records strictly ascending (GroupOrder::GIVEN: distinct), units numbered as given. Returns the
    // boundaries of its groups: group i has places [b[i], b[i+1]) of the order in which the units are served.
    const std::vector<std::uint32_t>& begin_access(Phase phase, std::uint32_t layer,
                                                   std::span<const std::uint32_t> records,
                                                   std::span<const std::uint16_t> flags);
    // Makes the next group resident and pins it: evictions first, then one decision for each needed entry, in order.
    // `ahead`: the following groups, as far as the lookahead allows. Returns the group's units.
    std::span<const std::uint32_t> next_group(Decided& demanded, Decided& ahead);
    void end_unit(std::uint32_t unit, Decided& decided);
    void end_group(Decided& decided);  // ends the remaining units; the last group ends the access

    // Speculation for a coming access, in the given order; stops at the first entry that does not fit. Returns how many
    // leading units are wholly covered.
    std::uint32_t prefetch(Phase phase, std::uint32_t layer, std::span<const std::uint32_t> records,
                           std::span<const std::uint16_t> flags, Decided& decided);
    void cancel_prefetch();

    // Pins across accesses; the entries must be resident. unpin applies dirty and drop (a drop waits for the last pin).
    void pin(std::span<const std::uint32_t> records, std::span<const std::uint16_t> flags);
    void unpin(std::span<const std::uint32_t> records, std::span<const std::uint16_t> flags,
               Decided& decided);

    // Keeps the resident ones of `records` (ascending), in this order, while a frame is left for others: each is pinned
    // until it is released. Returns 1 for each that is kept. release ignores those that are not kept.
    std::vector<std::uint8_t> keep(std::span<const std::uint32_t> records,
                                   std::span<const std::uint16_t> flags);
    void release(std::span<const std::uint32_t> records, std::span<const std::uint16_t> flags);

    // Dirty weights and moments that are not pinned.
    void clean(std::span<const std::uint32_t> records, Decided& decided);
    void clean_all(Decided& decided);
    void drop(std::span<const EntryId> entries, Decided& decided);
    void end_step();

    ResidencyStats stats() const;
    EntryState state(EntryId entry) const;
    std::vector<EntryId> resident_entries() const;
    std::vector<EntryId> dirty_entries() const;
    std::uint64_t used_frames() const;
    bool policy_failed() const;
    // What counts as a step now; and what did for the accesses until now.
    StepClock clock() const { return stats_.steps == 0 ? options_.clock : StepClock::STEPS; }
    StepClock recorded_clock() const { return counted_accesses_ ? options_.clock : StepClock::STEPS; }
    const ResidencyOptions& options() const { return options_; }
    std::uint32_t record_count() const { return static_cast<std::uint32_t>(layer_of_.size()); }
    // The open access, for its driver: groups begun, groups in total, whether one is open now.
    bool access_open() const { return access_open_; }
    bool group_open() const { return group_open_; }
    bool can_end(std::uint32_t unit) const {  // a unit of the open group that has not ended
        return in_open_group(unit) && unit_ended_[place_of_[unit]] == 0;
    }
    bool group_ended() const;  // all units of the open group have ended
    std::uint32_t groups_begun() const { return groups_begun_; }
    std::uint32_t group_count() const { return static_cast<std::uint32_t>(bounds_.size()) - 1; }

private:
    enum Flag : std::uint8_t { RESIDENT = 1, DIRTY = 2, STORED = 4, FRESH = 8, KNOWN = 16, KEPT = 32 };
    static constexpr std::uint32_t kHeld = 1u << 31;  // of busy_; the rest counts pins
    static constexpr EntryId kNobody = ~0u;

    // One cache: the whole budget, or one layer's quota.
    struct Domain {
        std::unique_ptr<Policy> policy;
        std::uint64_t limit = 0;  // frames that may be used: capacity or quota, less the policy's headroom
        std::uint64_t lookahead = 0;
        std::uint64_t used = 0;
        std::uint64_t pinned = 0;
        std::uint64_t busy = 0;  // pinned or on hold: not evictable
    };

    // How units are checked: an access's records ascend, or are distinct with GroupOrder::GIVEN; prefetched ones may
    // come in any order; pins may be of any layer, ascending.
    enum class Check : std::uint8_t { ACCESS, PREFETCH, RECORDS };

    Domain& domain_of(EntryId entry) { return domain_for(layer_of_[entry / kGroupStride]); }
    Domain& domain_for(std::uint32_t layer) { return domains_[options_.scope == Scope::LAYER ? layer : 0]; }
    std::uint32_t pins(EntryId entry) const { return busy_[entry] & ~kHeld; }
    bool held(EntryId entry) const { return (busy_[entry] & kHeld) != 0; }
    template <typename Visit>
    void each_needed(std::uint32_t record, std::uint16_t unit, Visit visit) const {
        for (std::uint32_t group = 0; group < kGroups; ++group) {
            if ((unit >> group & 1) != 0) visit(record * kGroupStride + group);
        }
    }
    void check_entry(EntryId entry) const;
    void check_units(std::uint32_t layer, std::span<const std::uint32_t> records,
                     std::span<const std::uint16_t> flags, Check check) const;
    void split(Domain& domain, Phase phase);
    void serve_residents_first();
    bool in_open_group(std::uint32_t unit) const {
        return group_open_ && unit < place_of_.size() && place_of_[unit] >= bounds_[groups_begun_ - 1] &&
               place_of_[unit] < bounds_[groups_begun_];
    }
    void tell(EventKind kind, std::span<const std::uint32_t> records = {},
              std::span<const std::uint16_t> flags = {}, Phase phase = Phase::INIT, std::uint32_t layer = 0) {
        if (observer_) tell_observer(Event{kind, phase, layer, 0, step_, records, flags, nullptr});
    }
    void tell_observer(Event event);
    void tick_step();
    void announce(Phase phase, std::span<const std::uint32_t> records, std::span<const std::uint16_t> flags);
    [[noreturn]] void refuse_capacity(const Domain& domain, std::uint64_t added) const;
    void request(Domain& domain, EntryId entry, Decided& decided);
    void finish(std::uint32_t record, std::uint16_t unit, Decided& decided);
    void mark_stored(std::uint32_t record, std::uint16_t mask);
    void clean_entry(EntryId entry, Decided& decided);
    std::vector<EntryId> entries_with(std::uint8_t flag) const;

    // eviction.cpp: which entries stay and which are evicted.
    std::uint32_t hold_units(Domain& domain, std::span<const std::uint32_t> records,
                             std::span<const std::uint16_t> units, Decided& decided);
    bool hold(Domain& domain, EntryId entry, Decided& decided);
    void release(EntryId entry);
    void unhold(EntryId entry);
    void release_holds();
    bool make_room(Domain& domain, std::uint64_t frames, Decided& decided);
    void cancel_holds_for(Domain& domain, std::uint64_t frames, Decided& decided);
    void evict(Domain& domain, EntryId entry, Decided& decided);
    void leave(Domain& domain, EntryId entry);
    void drop_entry(EntryId entry, Decided& decided);
    void pin_entry(Domain& domain, EntryId entry);
    void unpin_entry(EntryId entry);
    void tell_policy(Domain& domain, EntryId entry);

    ResidencyOptions options_;
    std::shared_ptr<ResidencyObserver> observer_;
    std::vector<std::uint32_t> ended_;  // units of the open group that are not reported to the observer yet
    std::uint32_t step_ = 0;
    std::vector<Domain> domains_;
    // By entry.
    std::vector<std::uint32_t> frames_;
    std::vector<std::uint32_t> busy_;
    std::vector<std::uint8_t> flags_;
    std::vector<std::uint64_t> bytes_;
    std::vector<std::uint32_t> layer_of_;  // by record
    // Entries on hold, oldest first; kNobody for one that was released, until it is swept.
    std::vector<EntryId> holds_;
    std::vector<std::uint32_t> hold_slot_;  // by entry: where in holds_
    std::uint64_t fresh_held_frames_ = 0;
    // The open access.
    bool access_open_ = false;
    bool group_open_ = false;
    std::uint32_t access_layer_ = 0;
    bool counts_access_ = false;  // whether the open access counts as a step
    bool counted_accesses_ = false;
    std::uint64_t clocked_ = 0;  // accesses that may be steps
    std::uint32_t groups_begun_ = 0;
    // By place in the order in which its units are served.
    std::vector<std::uint32_t> records_;
    std::vector<std::uint16_t> units_;
    std::vector<std::uint8_t> unit_ended_;
    std::vector<std::uint32_t> unit_at_;
    std::vector<std::uint32_t> place_of_;  // by unit
    std::vector<std::uint32_t> bounds_{0};
    std::vector<EntryId> victims_;          // scratch
    std::vector<EntryId> announced_;        // scratch
    std::vector<std::uint8_t> requesters_;  // scratch: of what is announced
    ResidencyStats stats_;
};

}  // namespace tierstore
