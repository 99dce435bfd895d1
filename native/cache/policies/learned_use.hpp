// Eviction by the learned probability that a sequence uses an entry in the next pass of its layer.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "native/cache/activation_model.hpp"
#include "native/cache/layer_cycle.hpp"
#include "native/cache/policy.hpp"

namespace tierstore {

struct LearnedUseOptions {
    ActivationOptions model;
    double price = 0.012;  // cost of holding an entry for one pass, in uses
    double later = 0.4;    // weight of a use after the next pass
};

// For decoding: several sequences, with one token each, walk through the layers together. An access may say which of
// them requested which entry (AccessInfo::requesters); without that they count as one. A prompt's access says it for each
// sequence's last token; nothing is learned from the requests of its other tokens. A pass of layer l teaches an
// ActivationModel what each sequence used, and an entry e of the layer then has, over the sequences s that took part,
//     p = 1 - prod_s (1 - P_s(e))      a use in the next pass of l
//     q = 1 - prod_s (1 - f_s(e))      a use in any one pass, by decayed frequency
// With D passes until l is passed again, its worth is
//     p + later (1 - p) q - price D
// and the victim is the entry with the least worth, ties by entry: the benefit of holding it, minus what the memory
// would bring elsewhere. Entries that the open access announced and has not used yet are evicted last.
//
// What is learned about a layer while the present token approaches it is not used: even if all choices of the step were
// known at its beginning, evictions would hardly be better (docs/RESULTS.md), since what is not resident must be read
// anyway.
//
// A sequence without a request in a whole cycle has ended: its number may be reused. A cycle counts only if
// it has an access whose entries were all requested by some sequence. The others are those of prompts, between two
// tokens of the other sequences.
class LearnedUse final : public Policy {
public:
    explicit LearnedUse(const LearnedUseOptions& options);
    bool follows_accesses() const override { return true; }
    void add(EntryId entry, const EntryInfo& info) override;
    void access(const AccessInfo& info) override;
    void insert(EntryId entry) override;
    void hit(EntryId entry) override { entries_[entry].pending = false; }
    void remove(EntryId entry) override;
    void tick(Clock) override {}
    std::uint64_t select(const Candidates& candidates, std::uint64_t frames,
                         std::vector<EntryId>& victims) override;

private:
    struct Entry {
        double value = 0.0;  // p + later (1 - p) q
        std::uint32_t layer = 0;
        std::uint32_t place = 0;  // within its layer
        bool real = false;
        bool resident = false;
        bool pending = false;
    };
    struct Ranked {
        double worth;
        EntryId entry;
        bool operator<(const Ranked& other) const {
            return worth < other.worth || (worth == other.worth && entry < other.entry);
        }
    };
    static constexpr std::uint32_t kAlone = ActivationModel::kSequences - 1;  // if accesses name no sequences

    void announce(const AccessInfo& info);
    void pass(std::uint32_t layer, const AccessInfo& info);
    double worth(EntryId entry) const;

    LearnedUseOptions options_;
    ActivationModel model_;
    LayerCycle cycle_;
    std::vector<Entry> entries_;
    std::vector<std::vector<EntryId>> layers_;  // the entries of each, by place
    std::vector<EntryId> residents_;            // in no particular order
    std::vector<std::uint32_t> resident_at_;    // by entry
    std::vector<EntryId> pending_;
    std::uint64_t cycles_ = 1;  // cycles in which an access named its sequences, and the present one
    bool told_ = false;         // whether the present cycle is one of them
    std::uint32_t last_position_ = 0;
    std::array<std::uint64_t, ActivationModel::kSequences> heard_{};            // in which cycle; 0: never
    std::array<std::vector<std::uint32_t>, ActivationModel::kSequences> used_;  // scratch: places
    std::vector<Ranked> ranked_;                                                // scratch
};

std::unique_ptr<Policy> make_learned_use(const PolicyOptions& options);

}  // namespace tierstore
