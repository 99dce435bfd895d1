#pragma once

#include <memory>
#include <vector>

#include "native/cache/entry_lists.hpp"
#include "native/cache/policy.hpp"

namespace tierstore {

struct LirsOptions {
    double hir_fraction = 0.01;   // of the capacity: reserved for entries of high inter-reference recency
    double stack_fraction = 2.0;  // of the capacity: the most that stack S may hold, ghosts included
};

// LIRS: Jiang and Zhang, "LIRS: an efficient low inter-reference recency set replacement policy", 2002. Stack S orders
// LIR entries, and the HIR ones (including ghosts) that were used since its bottom; queue Q holds resident HIR entries,
// and its front is the victim. An HIR entry used again while it is in S becomes LIR, and the bottom of S then becomes
// HIR. S is bounded by forgetting the oldest ghosts. If all of Q is busy, LIR entries are evicted from the bottom of S
// upwards, without a ghost.
class Lirs final : public Policy {
public:
    explicit Lirs(const LirsOptions& options) : options_(options), stack_(1), status_(3) {}
    void set_capacity(std::uint64_t frames) override;
    void add(EntryId entry, const EntryInfo& info) override;
    void insert(EntryId entry) override;
    void hit(EntryId entry) override;
    void remove(EntryId entry) override;
    void tick(Clock) override {}
    std::uint64_t select(const Candidates& candidates, std::uint64_t frames,
                         std::vector<EntryId>& victims) override;
    void prefetch(EntryId entry) const {
        stack_.prefetch(entry);
        status_.prefetch(entry);
    }

private:
    static constexpr EntryLists::List kStack = 1;
    // HIR is queue Q; GHOST is ordered by eviction, oldest first; the order of LIR has no meaning.
    enum : EntryLists::List { LIR = 1, HIR, GHOST };

    bool in_stack(EntryId entry) const { return stack_.list_of(entry) == kStack; }
    void promote(EntryId entry);
    void prune();
    void limit();

    LirsOptions options_;
    std::uint64_t lir_frames_ = 0;
    std::uint64_t stack_frames_ = 0;
    EntryLists stack_;
    EntryLists status_;
};

std::unique_ptr<Policy> make_lirs(const PolicyOptions& options);

}  // namespace tierstore
