#pragma once

#include <memory>

#include "native/cache/entry_queue.hpp"
#include "native/cache/policy.hpp"

namespace tierstore {

// Least recently used. Entries that are not evictable keep their place.
class Lru final : public Policy {
public:
    void insert(EntryId entry) override { queue_.push(entry); }
    void hit(EntryId entry) override { queue_.renew(entry); }
    void remove(EntryId entry) override { queue_.erase(entry); }
    void tick(Clock) override {}
    std::uint64_t select(const Candidates& candidates, std::uint64_t frames,
                         std::vector<EntryId>& victims) override;
    void prefetch(EntryId entry) const { queue_.prefetch(entry); }

private:
    EntryQueue queue_;
};

std::unique_ptr<Policy> make_lru(const PolicyOptions& options);

}  // namespace tierstore
