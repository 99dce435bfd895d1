#include "native/cache/policies/next_use.hpp"

#include <algorithm>
#include <cmath>

namespace tierstore {
namespace {

// The chance of an entry that no cycle has used yet.
constexpr double kLeastChance = 1e-9;

}  // namespace

NextUse::NextUse(const NextUseOptions& options) : decay_(std::exp2(-1.0 / options.half_life)) {}

void NextUse::add(EntryId entry, const EntryInfo& info) {
    if (entry >= entries_.size()) entries_.resize(entry + 1);
    if (info.frames == 0) return;
    Entry& added = entries_[entry];
    added.real = true;
    added.record = info.record;
    added.layer = info.layer;
    if (info.layer >= layers_.size()) layers_.resize(info.layer + 1);
    Layer& layer = layers_[info.layer];
    if (layer.entries.empty()) ++own_layers_;
    layer.entries.push_back(entry);
    cycle_.add_layer(info.layer);
    if (info.record >= record_rank_.size()) {
        record_rank_.resize(info.record + 1, 0);
        record_active_.resize(info.record + 1, 0);
    }
    if (layer.records.empty() || layer.records.back() < info.record) {
        record_rank_[info.record] = static_cast<std::uint32_t>(layer.records.size());
        layer.records.push_back(info.record);
    }
    layer.sorted = false;
}

void NextUse::access(const AccessInfo& info) {
    const LayerCycle::Pass pass = cycle_.enter(info.phase, info.layer);
    for (const EntryId entry : pending_) entries_[entry].pending = false;
    pending_.clear();
    for (const EntryId entry : info.entries) {
        if (entry >= entries_.size() || !entries_[entry].real) continue;  // of another layer's cache
        entries_[entry].pending = true;
        pending_.push_back(entry);
    }
    for (const EntryId entry : pending_) layers_[entries_[entry].layer].sorted = false;
    if (info.layer >= layers_.size() || layers_[info.layer].entries.empty()) return;
    Layer& layer = layers_[info.layer];
    layer.sorted = false;
    if (pass == LayerCycle::Pass::FORWARD) pass_forward(layer);
    if (pass == LayerCycle::Pass::BACKWARD) pass_backward(layer);
}

void NextUse::pass_forward(Layer& layer) {
    if (layer.backward_due) close_cycle(layer);  // there was no backward pass
    for (const std::uint32_t record : layer.records) record_active_[record] = 0;
    for (const EntryId entry : layer.entries) {
        Entry& of = entries_[entry];
        of.used_forward = of.pending;
        of.used_backward = false;
        if (of.pending) record_active_[of.record] = 1;
    }
    layer.backward_due = true;
    if (!cycle_.trains()) close_cycle(layer);
}

void NextUse::pass_backward(Layer& layer) {
    for (const EntryId entry : layer.entries) {
        Entry& of = entries_[entry];
        of.used_backward = of.pending;
        if (!layer.backward_due || record_active_[of.record] == 0) continue;
        const double fresh = of.ever_active ? 1.0 - decay_ : 1.0;
        of.backward += fresh * ((of.pending ? 1.0 : 0.0) - of.backward);
        of.ever_active = true;
    }
    if (layer.backward_due) close_cycle(layer);
}

void NextUse::close_cycle(Layer& layer) {
    layer.backward_due = false;
    const double fresh = std::max(1.0 - decay_, 1.0 / static_cast<double>(++layer.cycles));
    odds_.fade(own_layers_);
    for (const EntryId entry : layer.entries) {
        const Entry& of = entries_[entry];
        odds_.count(of.past, of.used_forward || of.used_backward);
    }
    for (const EntryId entry : layer.entries) {
        Entry& of = entries_[entry];
        const bool used = of.used_forward || of.used_backward;
        if (used)
            of.late += (of.age == kNever ? 1.0 : 1.0 - decay_) * ((of.used_forward ? 0.0 : 1.0) - of.late);
        of.use += fresh * ((used ? 1.0 : 0.0) - of.use);
        of.age = used ? 0 : std::min(of.age + 1, kNever);
        of.past = UseOdds::past(of.age, of.use);
        of.chance = odds_.chance(of.past, of.use);
        of.used_forward = of.used_backward = false;
    }
}

void NextUse::insert(EntryId entry) {
    entries_[entry].resident = true;
    used(entry);
}

void NextUse::used(EntryId entry) {
    entries_[entry].pending = false;
    layers_[entries_[entry].layer].sorted = false;
}

double NextUse::phase_of(const Entry& entry) const {
    return static_cast<double>(record_rank_[entry.record]) /
           static_cast<double>(layers_[entry.layer].records.size());
}

double NextUse::tail(const Entry& entry) const {
    const double chance = std::max(entry.chance, kLeastChance);
    const double wait = cycle_.length() * (1.0 - chance) / chance;
    if (!cycle_.trains()) return wait;
    return (2.0 * cycle_.layers() - 1.0 - 2.0 * cycle_.rank(entry.layer)) * entry.late + wait;
}

void NextUse::rank(List& list) {
    std::sort(list.ranked.begin(), list.ranked.end(), [](const Ranked& a, const Ranked& b) {
        return a.key > b.key || (a.key == b.key && a.entry < b.entry);
    });
}

void NextUse::sort(Layer& layer) {
    for (List& list : layer.lists) {
        list.ranked.clear();
        list.next = 0;
    }
    const bool turns = cycle_.trains() && layer.backward_due;
    for (const EntryId entry : layer.entries) {
        const Entry& of = entries_[entry];
        if (!of.resident || of.pending) continue;
        double key = phase_of(of);
        const bool active = turns && record_active_[of.record] != 0;
        if (active) {
            key += (1.0 - of.backward) * (2.0 * cycle_.rank(of.layer) + 1.0 + tail(of));
        } else {
            key += tail(of);
        }
        layer.lists[active ? ACTIVE : IDLE].ranked.push_back(Ranked{key, entry});
    }
    for (List& list : layer.lists) rank(list);
    layer.sorted = true;
}

// The next of a list that can go joins the choice.
void NextUse::offer(List& list, const Candidates& candidates) {
    for (; list.at < list.ranked.size(); ++list.at) {
        const Ranked& ranked = list.ranked[list.at];
        if (!entries_[ranked.entry].resident) {
            if (list.at == list.next) ++list.next;
        } else if (candidates.evictable(ranked.entry)) {
            offers_.push_back(Offer{list.shift + ranked.key, ranked.entry, &list});
            return;
        }
    }
}

std::uint64_t NextUse::choose(const Candidates& candidates, std::uint64_t frames,
                              std::vector<EntryId>& victims) {
    std::uint64_t freed = 0;
    while (freed < frames && !offers_.empty()) {
        std::size_t worst = 0;
        for (std::size_t i = 1; i < offers_.size(); ++i) {
            const Offer &a = offers_[i], &b = offers_[worst];
            if (a.distance > b.distance || (a.distance == b.distance && a.entry < b.entry)) worst = i;
        }
        const Offer chosen = offers_[worst];
        offers_[worst] = offers_.back();
        offers_.pop_back();
        victims.push_back(chosen.entry);
        freed += candidates.frames[chosen.entry];
        ++chosen.list->at;
        offer(*chosen.list, candidates);
    }
    return freed;
}

std::uint64_t NextUse::select(const Candidates& candidates, std::uint64_t frames,
                              std::vector<EntryId>& victims) {
    const bool changed = version_ != cycle_.version();
    version_ = cycle_.version();
    offers_.clear();
    for (std::uint32_t number = 0; number < layers_.size(); ++number) {
        Layer& layer = layers_[number];
        if (layer.entries.empty()) continue;
        if (changed || !layer.sorted) sort(layer);
        layer.lists[ACTIVE].shift = cycle_.trains() ? cycle_.to_backward(number) : 0.0;
        layer.lists[IDLE].shift = cycle_.to_forward(number);
        for (const State state : {ACTIVE, IDLE}) {
            layer.lists[state].at = layer.lists[state].next;
            offer(layer.lists[state], candidates);
        }
    }
    const std::uint64_t freed = choose(candidates, frames, victims);
    if (freed >= frames) return 0;
    // What is announced goes last: it is needed within a pass.
    for (const EntryId entry : pending_) {
        const Entry& of = entries_[entry];
        if (of.pending && of.resident && candidates.evictable(entry)) {
            announced_.ranked.push_back(Ranked{phase_of(of), entry});
        }
    }
    rank(announced_);
    offer(announced_, candidates);
    choose(candidates, frames - freed, victims);
    announced_ = List{};
    return 0;
}

std::unique_ptr<Policy> make_next_use(const PolicyOptions& options) {
    OptionReader reader("next-use", options);
    NextUseOptions read;
    read.half_life = reader.number_in("half_life", read.half_life, 1e-3, 1e9);
    reader.finish();
    return std::make_unique<NextUse>(read);
}

}  // namespace tierstore
