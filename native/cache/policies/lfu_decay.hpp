// LFU with decay: Algorithm 1 of SE-MoE (section 2.2).
#pragma once

#include <memory>
#include <vector>

#include "native/cache/policy.hpp"
#include "native/cache/score_heap.hpp"

namespace tierstore {

// PAPER, as printed: one frame stays empty (`acc + 1 < size`); the victim is the minimum of `hits`, only if it is
// >= threshold, together with all that tie with it; K counts requests. Where the printed algorithm would evict nothing
// and still fetch, the smallest is evicted (counted as starved).
// CORRECTED: the minimum among those with hits >= threshold, ties by entry, one at a time; K counts training steps; the
// overall minimum if none qualifies (counted as starved).
// Both: pinned entries are no candidates. Line 17 of Algorithm 1 deletes `hits` on eviction, while the text before it
// keeps the hits of "each sparse parameter": `remember` keeps them, and they go on decaying.
//
// The arithmetic. Multiplying every count by beta changes no order between them, so instead the unit that a hit adds
// grows by 1 / beta at each decay; `hits` is score / unit, and hits >= threshold is score >= threshold * unit. Once the
// unit has reached 2^500, it and all scores are multiplied by 2^-500. If beta is a power of two, the bits are those of
// counts multiplied one by one, down to 2^-500.
enum class LfuVariant : std::uint8_t { PAPER, CORRECTED };

inline constexpr double kLeastBeta = 0x1p-500;  // a unit below 2^500 is still finite when it has grown

struct LfuDecayOptions {
    LfuVariant variant = LfuVariant::CORRECTED;
    double threshold = 0.0;      // >= 0
    double beta = 0.5;           // [kLeastBeta, 1]
    std::uint64_t interval = 8;  // K, >= 1
    bool remember = false;       // an evicted entry comes back with the hits it had
};

// K and beta act through one number: after this many steps (requests, in PAPER) a hit counts half. Infinite for
// beta = 1.
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

    void prefetch(EntryId entry) const {
        if (entry < entries_.size()) __builtin_prefetch(&entries_[entry], 1);
    }

private:
    // Where a resident entry's node is. READY: its hits were at or above the threshold when last checked; COLD: they
    // are below it. NAMED: in neither heap, since select() took it out.
    enum Place : std::uint8_t { NOWHERE, READY, COLD, NAMED };
    struct Entry {
        double score = 0.0;       // outside of the cache too, for `remember`
        std::uint32_t stamp = 0;  // of its latest node; earlier ones are out of date
        Place place = NOWHERE;
    };
    // A choice of victims in progress.
    struct Choice {
        const Candidates& candidates;
        std::vector<EntryId>& victims;
        std::uint64_t frames;  // to free
        std::uint64_t freed = 0;
        std::uint64_t starved = 0;

        bool done() const { return freed >= frames; }
    };

    void push(EntryId entry);
    bool settle(ScoreHeap& heap);
    void settle_ready();
    bool take(ScoreHeap& heap, Choice& choice);
    void take_cold(Choice& choice);
    void choose_corrected(Choice& choice);
    void choose_paper(Choice& choice);
    void decay();
    void rescale();
    void trim();

    LfuDecayOptions options_;
    std::uint64_t elapsed_ = 0;  // requests or steps since the last decay
    double unit_ = 1.0;
    double floor_;  // threshold * unit_
    std::vector<Entry> entries_;
    // A hit is one addition. Scores only grow, so a node's score is at most its entry's score, and the least of a heap
    // is found by updating its top until it is current.
    ScoreHeap ready_;
    ScoreHeap cold_;
    std::size_t live_ = 0;        // nodes that are the latest of their entry
    std::vector<EntryId> named_;  // by the last choice; most of them are evicted
    std::vector<EntryId> busy_;   // scratch: passed over by a choice
};

std::unique_ptr<Policy> make_lfu_decay(const PolicyOptions& options);

}  // namespace tierstore
