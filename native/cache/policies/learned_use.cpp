#include "native/cache/policies/learned_use.hpp"

#include <algorithm>

namespace tierstore {
namespace {

// Added to the worth of what the open access will use: no chance and no distance is as large.
constexpr double kAnnounced = 1e9;

}  // namespace

LearnedUse::LearnedUse(const LearnedUseOptions& options) : options_(options), model_(options.model) {}

void LearnedUse::add(EntryId entry, const EntryInfo& info) {
    if (entry >= entries_.size()) {
        entries_.resize(entry + 1);
        resident_at_.resize(entry + 1, 0);
    }
    if (info.frames == 0) return;
    if (info.layer >= layers_.size()) layers_.resize(info.layer + 1);
    std::vector<EntryId>& layer = layers_[info.layer];
    Entry& added = entries_[entry];
    added.real = true;
    added.layer = info.layer;
    added.place = static_cast<std::uint32_t>(layer.size());
    layer.push_back(entry);
    cycle_.add_layer(info.layer);
    model_.add_place(info.layer);
}

void LearnedUse::access(const AccessInfo& info) {
    const LayerCycle::Pass pass_of = cycle_.enter(info.phase, info.layer);
    announce(info);
    if (pass_of != LayerCycle::Pass::FORWARD) return;
    if (cycle_.position() <= last_position_) {
        cycles_ += told_ ? 1 : 0;
        told_ = false;
    }
    last_position_ = cycle_.position();
    if (info.layer < layers_.size() && !layers_[info.layer].empty()) pass(info.layer, info);
}

void LearnedUse::announce(const AccessInfo& info) {
    for (const EntryId entry : pending_) entries_[entry].pending = false;
    pending_.clear();
    for (const EntryId entry : info.entries) {
        if (entry >= entries_.size() || !entries_[entry].real) continue;  // of another layer's cache
        entries_[entry].pending = true;
        pending_.push_back(entry);
    }
}

void LearnedUse::pass(std::uint32_t number, const AccessInfo& info) {
    for (auto& used : used_) used.clear();
    const bool told = !info.requesters.empty();
    bool goes_on = told;  // whether each entry was requested by a sequence, as in a step of decoding
    for (std::size_t i = 0; i < info.entries.size(); ++i) {
        const EntryId entry = info.entries[i];
        if (entry >= entries_.size() || !entries_[entry].real || entries_[entry].layer != number) continue;
        if (!told) {
            used_[kAlone].push_back(entries_[entry].place);
            continue;
        }
        const std::uint32_t requesters = info.requesters[i];
        goes_on = goes_on && requesters != 0;
        for (std::uint32_t sequence = 0; sequence < kAlone; ++sequence) {
            if ((requesters >> sequence & 1) != 0) used_[sequence].push_back(entries_[entry].place);
        }
    }
    told_ = told_ || goes_on;
    const std::vector<EntryId>& layer = layers_[number];
    std::vector<double> none(layer.size(), 1.0);  // chances that no sequence uses it in the next pass
    std::vector<double> never(layer.size(), 1.0);
    for (std::uint32_t sequence = 0; sequence < used_.size(); ++sequence) {
        std::vector<std::uint32_t>& used = used_[sequence];
        if (used.empty()) continue;
        std::sort(used.begin(), used.end());
        if (heard_[sequence] + 1 < cycles_) model_.forget(sequence);
        heard_[sequence] = cycles_;
        model_.pass(sequence, number, used);
        const std::span<const float> chances = model_.chances(sequence, number);
        for (std::uint32_t place = 0; place < layer.size(); ++place) {
            none[place] *= 1.0 - static_cast<double>(chances[place]);
            never[place] *= 1.0 - static_cast<double>(model_.frequency(sequence, number, place));
        }
    }
    for (std::uint32_t place = 0; place < layer.size(); ++place) {
        entries_[layer[place]].value =
            1.0 - none[place] + options_.later * none[place] * (1.0 - never[place]);
    }
}

void LearnedUse::insert(EntryId entry) {
    entries_[entry].resident = true;
    entries_[entry].pending = false;
    resident_at_[entry] = static_cast<std::uint32_t>(residents_.size());
    residents_.push_back(entry);
}

void LearnedUse::remove(EntryId entry) {
    entries_[entry].resident = false;
    const std::uint32_t at = resident_at_[entry];
    residents_[at] = residents_.back();
    resident_at_[residents_[at]] = at;
    residents_.pop_back();
}

double LearnedUse::worth(EntryId entry) const {
    const Entry& of = entries_[entry];
    if (of.pending) return kAnnounced + of.value;
    return of.value - options_.price * cycle_.to_forward(of.layer);
}

std::uint64_t LearnedUse::select(const Candidates& candidates, std::uint64_t frames,
                                 std::vector<EntryId>& victims) {
    ranked_.clear();
    for (const EntryId entry : residents_) {
        if (candidates.evictable(entry)) ranked_.push_back(Ranked{worth(entry), entry});
    }
    // A heap with the least worth first: a choice takes a few of many.
    const auto later = [](const Ranked& a, const Ranked& b) { return b < a; };
    std::make_heap(ranked_.begin(), ranked_.end(), later);
    std::uint64_t freed = 0;
    while (freed < frames && !ranked_.empty()) {
        std::pop_heap(ranked_.begin(), ranked_.end(), later);
        const EntryId entry = ranked_.back().entry;
        ranked_.pop_back();
        victims.push_back(entry);
        freed += candidates.frames[entry];
    }
    return 0;
}

std::unique_ptr<Policy> make_learned_use(const PolicyOptions& options) {
    OptionReader reader("learned-use", options);
    LearnedUseOptions read;
    read.model.half_life = reader.number_in("half_life", read.model.half_life, 1e-3, 1e9);
    read.model.rate = reader.number_in("rate", read.model.rate, 0.0, 1.0);
    read.price = reader.number_in("price", read.price, 0.0, 1.0);
    read.later = reader.number_in("later", read.later, 0.0, 1.0);
    reader.finish();
    return std::make_unique<LearnedUse>(read);
}

}  // namespace tierstore
