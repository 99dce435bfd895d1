#include "native/sim/recency_stack.hpp"

#include <algorithm>

namespace tierstore {

RecencyStack::RecencyStack(std::uint32_t entry_count) : where_(entry_count, kNowhere) {
    constexpr std::uint64_t kSpread = 4;  // length of the log, by what can live in it
    const std::uint64_t blocks = kSpread * entry_count / kBlock + 2;
    log_.resize(blocks * kBlock);
    bits_.resize(blocks * kBlock / 64);
    tree_.resize(blocks + 1);
}

void RecencyStack::squeeze() {
    std::uint32_t to = 0;
    for (std::uint32_t at = 0; at < end_; ++at) {
        const EntryId entry = log_[at];
        if (where_[entry] != at) continue;
        where_[entry] = to;
        log_[to++] = entry;
    }
    end_ = to;
    std::fill(bits_.begin(), bits_.end(), 0);
    std::fill(tree_.begin(), tree_.end(), 0);
    for (std::uint32_t at = 0; at < to; ++at) mark(at, 1);
}

}  // namespace tierstore
