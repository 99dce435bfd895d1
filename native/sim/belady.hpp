// Belady's MIN (1966): evicts the entry requested furthest in the future. It must know all requests beforehand, so no
// real cache could run it.
#pragma once

#include <span>
#include <vector>

#include "native/cache/policy.hpp"
#include "native/sim/ordered_bits.hpp"

namespace tierstore {

// `requests` is every request of this cache, in order; it must outlive the policy. Entries that are never requested
// again are evicted first, smallest first; then by next request. Atomic sets need nothing more: entries of one later
// set differ by their place in it, and which of them is evicted changes no count, unless that set is split into
// groups.
//
// With entries of one size this gives the fewest misses that forced admission allows, for sets that fit too, and for
// those that are split in key order (with residents first, what is kept decides the groups, and it is a heuristic):
// keeping an entry from one request to the next saves a miss and occupies a frame at every event between, and of those
// that cannot all be kept, the one that ends last conflicts with most. With optional admission (room is made after a
// request, see simulation.hpp) it gives the fewest of all. With unequal sizes both are heuristics, and neither
// minimises write-backs. A warm-up has no limit (see simulation.hpp), so that no policy misses less after it, whatever
// it did before.
class Belady final : public Policy {
public:
    static constexpr bool kKnowsFuture = true;
    Belady(std::span<const EntryId> requests, std::uint32_t entry_count);
    void insert(EntryId entry) override { advance(entry); }
    void hit(EntryId entry) override;
    void remove(EntryId entry) override;
    void bypass(EntryId entry) override { next_[entry] = after_[next_[entry]]; }
    void tick(Clock) override {}
    std::uint64_t select(const Candidates& candidates, std::uint64_t frames,
                         std::vector<EntryId>& victims) override;
    void prefetch(EntryId entry) const { __builtin_prefetch(&next_[entry], 1); }

private:
    static constexpr std::uint32_t kNever = ~0u;
    void advance(EntryId entry);

    std::span<const EntryId> requests_;
    std::vector<std::uint32_t> after_;  // by request: the next one for the same entry, or kNever
    std::vector<std::uint32_t> next_;   // by entry: its next request, resident or not
    OrderedBits ahead_;                 // next requests of resident entries
    OrderedBits done_;                  // resident and never requested again, counted from the last entry
};

}  // namespace tierstore
