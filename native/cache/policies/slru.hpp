#pragma once

#include <memory>
#include <vector>

#include "native/cache/entry_lists.hpp"
#include "native/cache/policy.hpp"

namespace tierstore {

// Segmented LRU: Karedla, Love and Wherry, "Caching strategies to improve disk system performance", 1994, with any
// number of segments as in Huang et al., "An analysis of Facebook photo caching", 2013 (S4LRU). A hit moves an entry to
// the segment above; a segment that is too full demotes its oldest entry; the oldest of the lowest segment is the
// victim. While the cache fills, a newcomer enters the lowest segment that has room.
class Slru final : public Policy {
public:
    explicit Slru(std::uint32_t segments);
    void set_capacity(std::uint64_t frames) override;
    void add(EntryId entry, const EntryInfo& info) override;
    void insert(EntryId entry) override;
    void hit(EntryId entry) override;
    void remove(EntryId entry) override { lists_.take(entry); }
    void tick(Clock) override {}
    std::uint64_t select(const Candidates& candidates, std::uint64_t frames,
                         std::vector<EntryId>& victims) override;
    void prefetch(EntryId entry) const { lists_.prefetch(entry); }

private:
    EntryLists lists_;                  // list 1 is the lowest segment
    std::vector<std::uint64_t> share_;  // by list: the frames that a segment may hold
};

std::unique_ptr<Policy> make_slru(const PolicyOptions& options);

}  // namespace tierstore
