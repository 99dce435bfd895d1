#pragma once

#include <memory>
#include <vector>

#include "native/cache/entry_lists.hpp"
#include "native/cache/policy.hpp"

namespace tierstore {

// ARC: Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", 2003. T1 holds entries requested once,
// T2 those requested again; B1 and B2 are their ghosts, and a miss on a ghost moves the target p of T1. Sizes are
// frames; a step of p is as many frames as its entry has. If several entries miss together, p follows each of them
// before the victims are chosen, and the tie |T1| = p is broken for the last.
class Arc final : public Policy {
public:
    Arc() : lists_(5) {}
    void set_capacity(std::uint64_t frames) override { capacity_ = frames; }
    void add(EntryId entry, const EntryInfo& info) override;
    void miss(EntryId entry) override;
    void insert(EntryId entry) override;
    void hit(EntryId entry) override { lists_.move_newest(T2, entry); }
    void remove(EntryId entry) override;
    void tick(Clock) override {}
    std::uint64_t select(const Candidates& candidates, std::uint64_t frames,
                         std::vector<EntryId>& victims) override;
    void prefetch(EntryId entry) const { lists_.prefetch(entry); }

private:
    // WANTED: its ghost was found, and it is about to enter T2.
    enum : EntryLists::List { T1 = 1, T2, B1, B2, WANTED };

    std::uint64_t capacity_ = 0;
    double target_ = 0.0;     // p: the frames that T1 should hold
    bool missed_b2_ = false;  // the last miss was on a ghost of T2
    EntryLists lists_;
};

std::unique_ptr<Policy> make_arc(const PolicyOptions& options);

}  // namespace tierstore
