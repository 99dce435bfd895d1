#pragma once

#include <memory>
#include <vector>

#include "native/cache/entry_lists.hpp"
#include "native/cache/policy.hpp"

namespace tierstore {

struct TwoQOptions {
    double in_fraction = 0.25;  // of the capacity: entries requested once
    double out_fraction = 0.5;  // of the capacity: ghosts of those
};

// 2Q, full version: Johnson and Shasha, "2Q: a low overhead high performance buffer management replacement algorithm",
// 1994. A newcomer enters A1in, a FIFO whose victims leave a ghost in A1out; one whose ghost is found enters Am, an LRU
// list. A1in gives the victim while it has more than its share, else Am.
class TwoQ final : public Policy {
public:
    explicit TwoQ(const TwoQOptions& options) : options_(options), lists_(4) {}
    void set_capacity(std::uint64_t frames) override;
    void add(EntryId entry, const EntryInfo& info) override;
    void miss(EntryId entry) override;
    void insert(EntryId entry) override;
    void hit(EntryId entry) override;
    void remove(EntryId entry) override;
    void tick(Clock) override {}
    std::uint64_t select(const Candidates& candidates, std::uint64_t frames,
                         std::vector<EntryId>& victims) override;
    void prefetch(EntryId entry) const { lists_.prefetch(entry); }

private:
    // WANTED: its ghost was found, and it is about to enter.
    enum : EntryLists::List { IN = 1, MAIN, OUT, WANTED };

    TwoQOptions options_;
    std::uint64_t in_frames_ = 0;
    std::uint64_t out_frames_ = 0;
    EntryLists lists_;
};

std::unique_ptr<Policy> make_two_q(const PolicyOptions& options);

}  // namespace tierstore
