#pragma once

#include <memory>
#include <vector>

#include "native/cache/entry_queue.hpp"
#include "native/cache/policy.hpp"

namespace tierstore {

// SIEVE (Zhang et al., NSDI 2024): a queue in order of arrival that hits do not change; a hand moves from the oldest to
// the newest and round again, clears the mark of entries that were hit and evicts those without one. Entries that are
// not evictable keep their place and their mark.
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
    // kNamed only inside select(): the hand may return to an entry that it has named.
    enum Mark : std::uint8_t { kUnvisited, kVisited, kNamed };

    // After the newest entry comes the oldest, not the one that arrives next.
    void go_round();

    EntryQueue queue_;
    std::vector<std::uint8_t> marks_;  // by entry
};

std::unique_ptr<Policy> make_sieve(const PolicyOptions& options);

}  // namespace tierstore
