#pragma once

#include <memory>
#include <vector>

#include "native/cache/entry_queue.hpp"
#include "native/cache/policy.hpp"

namespace tierstore {

// CLOCK (second chance), generalised to a counter of `bits` bits: a hit increments an entry's counter, up to
// 2^bits - 1; the hand decrements it and moves on, and evicts at zero. Entries that are not evictable keep their place
// under the hand and their counter.
class ClockPolicy final : public Policy {
public:
    explicit ClockPolicy(std::uint8_t most) : most_(most) {}
    void insert(EntryId entry) override;
    void hit(EntryId entry) override {
        if (counts_[entry] < most_) ++counts_[entry];
    }
    void remove(EntryId entry) override { queue_.erase(entry); }
    void tick(Clock) override {}
    std::uint64_t select(const Candidates& candidates, std::uint64_t frames,
                         std::vector<EntryId>& victims) override;
    void prefetch(EntryId entry) const {
        if (entry < counts_.size()) __builtin_prefetch(&counts_[entry], 1);
    }

private:
    EntryQueue queue_;                  // the ring, cut open at the hand
    std::vector<std::uint8_t> counts_;  // by entry
    std::uint8_t most_;
};

std::unique_ptr<Policy> make_clock(const PolicyOptions& options);

}  // namespace tierstore
