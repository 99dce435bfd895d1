#pragma once

#include <memory>
#include <vector>

#include "native/cache/policy.hpp"

namespace tierstore {

// Least recently used: an intrusive list through vectors indexed by entry.
class Lru final : public Policy {
public:
    Lru();
    void insert(EntryId entry) override;
    void hit(EntryId entry) override;
    void remove(EntryId entry) override;
    void tick(Clock) override {}
    std::uint64_t select(const Candidates& candidates, std::uint64_t frames,
                         std::vector<EntryId>& victims) override;

private:
    struct Link {
        EntryId older;
        EntryId newer;
    };
    Link& link(EntryId entry) { return links_[entry + 1]; }

    // links_[0] closes the ring: its `newer` is the oldest entry, its `older` the newest. Entry e is at e +
    // 1, and inside a Link entries are stored by that position.
    std::vector<Link> links_;
};

std::unique_ptr<Policy> make_lru(const PolicyOptions& options);

}  // namespace tierstore
