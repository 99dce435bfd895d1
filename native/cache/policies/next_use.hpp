// Eviction by the expected time until the next use, over the known walk through the layers.
#pragma once

#include <memory>
#include <vector>

#include "native/cache/layer_cycle.hpp"
#include "native/cache/policy.hpp"
#include "native/cache/use_odds.hpp"

namespace tierstore {

struct NextUseOptions {
    double half_life = 16.0;  // cycles after which a use counts half
};

// A cycle has C passes (layer_cycle.hpp): L forward ones, and L backward ones if the program trains. Time is counted in
// passes. Within the pass of a layer, records are used in ascending order: the j-th of the n records of a layer is used
// r = j / n after the pass begins. (In an access that is split, residents come first; r only orders the entries of one
// layer.)
//
// Learned for each entry when the cycle is over for its layer (after the backward pass, or the forward one if there is
// none), each an average in which a cycle counts half after `half_life` later ones:
//   u  the fraction of the cycles in which it is used,
//   k  of those, the fraction in which its first use is in the backward pass,
//   b  of the cycles in which its record is used forward, the fraction in which the backward pass uses the entry.
// Weights have k = 0, b = 1; the moments of an expert that is stepped in its backward pass k = 1, b = 1.
//
// Entries are not used independently from cycle to cycle: a recently used one is likelier to be used again. So u is
// calibrated: of all entries that were last used a cycles ago, and had a certain u, the fraction that the next cycle
// did use is counted (use_odds.hpp); that is p, the probability of a use in the next cycle.
//
// With D_F and D_B passes until the next forward and backward pass of layer l, of which d = 2 L - 1 - 2 l are between
// the two in one cycle, and a geometric waiting time in cycles, the expected time until the next use, counted from the
// next forward pass, is
//     tail = d k + C (1 - p) / p
// An entry is in one of three states, each with its expected time until the next use:
//     PENDING  announced by the open access, not requested yet:             r
//     ACTIVE   its record was used forward, and the backward pass is due:  D_B + r + (1 - b) (2 l + 1 + tail)
//     IDLE     neither:                                                    D_F + r + tail
// (2 l + 1 passes are between the backward pass of layer l and its next forward pass.) The victim is the entry with the
// largest of these, ties by entry.
//
// Everything but D_F and D_B changes only in passes of the entry's own layer: the entries of a layer in one state keep
// their order while the program walks on, and the layers' lists only shift against each other. So each layer has a list
// for ACTIVE and one for IDLE, sorted when first needed after a pass (of the layer's n entries: O(n log n), once per
// pass), and a victim is the first of 2 L lists; PENDING entries are sorted if they must be evicted, after all others.
// Averages are updated once per cycle, in O(n).
//
// The heads of the lists are in a heap by the time of their expected next use, which is constant until the program
// reaches the pass that it is counted from: each pass moves one list. Times are compared exactly, distances as rounded:
// those that round to the same value are ties. So a choice costs O(log L).
class NextUse final : public Policy {
public:
    explicit NextUse(const NextUseOptions& options);
    bool follows_accesses() const override { return true; }
    void add(EntryId entry, const EntryInfo& info) override;
    void access(const AccessInfo& info) override;
    void insert(EntryId entry) override;
    void hit(EntryId entry) override { used(entry); }
    void remove(EntryId entry) override { entries_[entry].resident = false; }
    void tick(Clock) override {}
    std::uint64_t select(const Candidates& candidates, std::uint64_t frames,
                         std::vector<EntryId>& victims) override;

private:
    enum State : std::uint8_t { ACTIVE, IDLE };
    static constexpr std::size_t kStates = 2;
    static constexpr std::uint32_t kNever = 1u << 30;
    static constexpr std::uint32_t kNoList = ~0u;

    struct Entry {
        double use = 0.0;            // u
        double late = 0.0;           // k
        double backward = 1.0;       // b
        double chance = 0.0;         // p
        std::uint32_t age = kNever;  // cycles since the last use
        std::uint32_t past = UseOdds::past(kNever, 0.0);
        std::uint32_t record = 0;
        std::uint32_t layer = 0;
        bool real = false;
        bool resident = false;
        bool pending = false;
        bool used_forward = false;   // in the present cycle
        bool used_backward = false;  // in the present cycle
        bool ever_active = false;    // b is known
    };
    struct Ranked {
        double key;  // the expected time, without D_F or D_B
        EntryId entry;
    };
    // The resident entries of a layer in one state, the largest key first; those before `next` have left.
    struct List {
        std::vector<Ranked> ranked;
        std::size_t next = 0;
        std::size_t at = 0;       // the progress of the present choice
        double pass = 0.0;        // the time, by clock_, of the pass that keys count from
        std::uint32_t stamp = 0;  // of its place in the heap: other stamps are out of date
        bool touched = false;     // by the present choice
    };
    // The head of a list: sum + rest is its exact expected time.
    struct First {
        double sum;
        double rest;
        std::uint32_t list;
        std::uint32_t stamp;
    };
    struct Layer {
        std::vector<EntryId> entries;
        std::vector<std::uint32_t> records;  // ascending
        std::uint64_t cycles = 0;
        bool backward_due = false;
        bool sorted = false;
    };

    void pass_forward(Layer& layer);
    void pass_backward(Layer& layer);
    void close_cycle(Layer& layer);
    void used(EntryId entry);
    double phase_of(const Entry& entry) const;
    double tail(const Entry& entry) const;
    static void rank(std::vector<Ranked>& ranked);
    void unsort(std::uint32_t layer);
    void sort(std::uint32_t layer);
    void sort_all();
    void walk(std::uint32_t from);
    void set_pass(std::uint32_t list);
    void enter_heap(std::uint32_t list);
    bool take_first(First& first);
    void touch(std::uint32_t list);
    EntryId entry_of(const First& first) const;
    double distance_of(const First& first) const;
    bool take_evictable(First& first, const Candidates& candidates);
    std::uint64_t choose(const Candidates& candidates, std::uint64_t frames, std::vector<EntryId>& victims);
    std::uint64_t choose_announced(const Candidates& candidates, std::uint64_t frames,
                                   std::vector<EntryId>& victims);

    double decay_;  // of one cycle
    LayerCycle cycle_;
    UseOdds odds_;
    std::uint32_t version_ = 0;  // of the cycle, when the lists were last sorted
    std::vector<Entry> entries_;
    std::vector<Layer> layers_;
    std::uint32_t own_layers_ = 0;             // layers that have entries here
    std::vector<EntryId> pending_;             // announced by the open access
    std::vector<List> lists_;                  // of layer l: 2 l + state
    std::vector<std::uint32_t> unsorted_;      // layers
    std::vector<std::uint32_t> list_of_pass_;  // the list whose keys count from the pass, or kNoList
    std::vector<First> heap_;                  // the largest first
    std::vector<std::uint32_t> touched_;       // scratch: lists
    std::vector<First> ties_;                  // scratch
    std::vector<Ranked> announced_;            // scratch
    double clock_ = 0.0;                       // passes since the lists were last all sorted
    std::vector<std::uint8_t> record_active_;  // used forward in the present cycle
    std::vector<std::uint32_t> record_rank_;   // its place among the records of its layer
};

std::unique_ptr<Policy> make_next_use(const PolicyOptions& options);

}  // namespace tierstore
