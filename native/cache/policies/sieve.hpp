#pragma once

#include <memory>
#include <vector>

#include "native/cache/entry_queue.hpp"
#include "native/cache/policy.hpp"

namespace tierstore {

// SIEVE (Zhang et al., NSDI 2024): a queue in order of arrival that hits do not change; a hand goes from the
// oldest to the newest and round again, clears the mark of what was hit and evicts what has none. What cannot
// go keeps its place and its mark.
class Sieve final : public Policy {
public:
    void insert(EntryId entry) override;
    void hit(EntryId entry) override { marks_[entry] = kVisited; }
    void remove(EntryId entry) override;
    void tick(Clock) override {}
    std::uint64_t select(const Candidates& candidates, std::uint64_t frames,
                         std::vector<EntryId>& victims) override;
    void prefetch(EntryId entry) const {
        if (entry < marks_.size()) __builtin_prefetch(&marks_[entry], 1);
    }

private:
    // kNamed only inside select(): the hand may come round to what it has named.
    enum Mark : std::uint8_t { kUnvisited, kVisited, kNamed };

    // Past the newest entry comes the oldest, and not the one that arrives next.
    void go_round();

    EntryQueue queue_;
    std::vector<std::uint8_t> marks_;  // by entry
};

std::unique_ptr<Policy> make_sieve(const PolicyOptions& options);

}  // namespace tierstore
