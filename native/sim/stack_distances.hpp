// Exact LRU at every capacity in one pass (Mattson et al. 1970): an entry hits in all caches at least as large as its
// depth in the stack of most recently used entries.
#pragma once

#include <cstdint>
#include <vector>

#include "native/sim/simulate.hpp"

namespace tierstore {

struct StackDistances {
    std::uint64_t requests = 0;
    std::uint64_t cold = 0;           // requested for the first time: misses at every capacity
    std::uint64_t largest_event = 0;  // smaller capacities split an atomic event, and counts are invalid
    // How many requests found their entry at depth d (the most recently used has depth 1). With capacity c: misses =
    // cold + the sum of depths[d] for d > c. Up to the number of entries.
    std::vector<std::uint64_t> depths;
    // By capacity; empty without `writes`. Write-backs on eviction, as simulate() counts them (Thompson and Smith
    // 1989): a written entry is dirty in all caches that it has not left since.
    std::vector<std::uint64_t> write_backs;
};

// Entries of one size, one cache for all; uses the columns `offsets`, `entries` and `writes`. Time O(log m) per
// request and memory O(m) for entries numbered below m. Atomic events are exact because their entries are the top of
// the stack when they end: what a cache at least as large as the event keeps is again the top of the stack. Throws
// std::invalid_argument as simulate() does.
StackDistances stack_distances(const RequestColumns& requests, Contract contract,
                               std::uint64_t warmup_events);

}  // namespace tierstore
