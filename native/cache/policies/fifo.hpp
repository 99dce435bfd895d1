#pragma once

#include <memory>

#include "native/cache/entry_queue.hpp"
#include "native/cache/policy.hpp"

namespace tierstore {

// First in, first out. Entries that are not evictable keep their place.
class Fifo final : public Policy {
public:
    void insert(EntryId entry) override { queue_.push(entry); }
    void hit(EntryId) override {}
    void remove(EntryId entry) override { queue_.erase(entry); }
    void tick(Clock) override {}
    std::uint64_t select(const Candidates& candidates, std::uint64_t frames,
                         std::vector<EntryId>& victims) override;

private:
    EntryQueue queue_;
};

std::unique_ptr<Policy> make_fifo(const PolicyOptions& options);

}  // namespace tierstore
