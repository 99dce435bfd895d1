// LFU with decay: Algorithm 1 of SE-MoE (section 2.2).
#pragma once

#include <memory>
#include <vector>

#include "native/cache/policy.hpp"

namespace tierstore {

// PAPER, as printed: one frame stays empty (`acc + 1 < size`); the victim is the minimum of `hits`, taken
// only if it is >= threshold, and all that tie with it go; K counts requests. Where the printed algorithm
// would evict nothing and yet fetch, the smallest goes (counted as starved).
// CORRECTED: the minimum among those with hits >= threshold, ties by entry, one at a time; K counts training
// steps; the overall minimum when none qualifies (counted as starved).
// Both: what is pinned is no candidate, and `hits` is forgotten on eviction.
enum class LfuVariant : std::uint8_t { PAPER, CORRECTED };

struct LfuDecayOptions {
    LfuVariant variant = LfuVariant::CORRECTED;
    double threshold = 0.0;       // >= 0
    double beta = 0.5;            // (0, 1]
    std::uint64_t interval = 8;  // K, >= 1
};

// K and beta act through one number: after this many steps (requests, in PAPER) a hit counts half.
// Infinite for beta = 1.
double half_life(double beta, double interval);
double beta_for_half_life(double half_life, double interval);

LfuDecayOptions read_lfu_decay_options(const PolicyOptions& options);

class LfuDecay final : public Policy {
public:
    explicit LfuDecay(const LfuDecayOptions& options);
    void insert(EntryId entry) override;
    void hit(EntryId entry) override;
    void remove(EntryId entry) override;
    void tick(Clock clock) override;
    std::uint64_t select(const Candidates& candidates, std::uint64_t frames,
                         std::vector<EntryId>& victims) override;

private:
    // A binary heap of entries, smallest (hits, entry) first; slot_ says where an entry sits, so that it can
    // move when its hits change. Entries at or above the threshold and those below have a heap each.
    using Heap = std::vector<EntryId>;

    // The smallest entries of a heap one after another, without changing it: the frontier holds positions
    // whose parents were taken already.
    class Ascent {
    public:
        Ascent(const LfuDecay& policy, const Heap& heap, std::vector<std::uint32_t>& frontier);
        bool done() const { return frontier_.empty(); }
        EntryId peek() const { return heap_[frontier_.front()]; }
        EntryId next();

    private:
        bool later(std::uint32_t a, std::uint32_t b) const { return policy_.before(heap_[b], heap_[a]); }
        const LfuDecay& policy_;
        const Heap& heap_;
        std::vector<std::uint32_t>& frontier_;
    };

    bool before(EntryId a, EntryId b) const { return hits_[a] < hits_[b] || (hits_[a] == hits_[b] && a < b); }
    Heap& heap_of(EntryId entry) { return hits_[entry] >= options_.threshold ? ready_ : cold_; }
    void push(EntryId entry);
    void take_out(Heap& heap, std::uint32_t at);
    std::uint32_t sift_up(Heap& heap, std::uint32_t at);
    void sift_down(Heap& heap, std::uint32_t at);
    void decay();
    std::uint64_t select_paper(const Candidates&, std::uint64_t frames, std::vector<EntryId>&) const;

    LfuDecayOptions options_;
    std::uint64_t elapsed_ = 0;  // requests or steps since the last decay
    std::vector<double> hits_;
    std::vector<std::uint32_t> slot_;
    Heap ready_;
    Heap cold_;
    mutable std::vector<std::uint32_t> frontier_;  // scratch of select()
};

std::unique_ptr<Policy> make_lfu_decay(const PolicyOptions& options);

}  // namespace tierstore
