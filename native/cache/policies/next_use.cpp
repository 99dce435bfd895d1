#include "native/cache/policies/next_use.hpp"

#include <algorithm>
#include <cmath>

namespace tierstore {
namespace {

// The chance of an entry that no cycle has used yet.
constexpr double kLeastChance = 1e-9;

// The heap has the largest time first; of equal times the order is settled later.
constexpr auto kEarlier = [](const auto& a, const auto& b) {
    return a.sum < b.sum || (a.sum == b.sum && a.rest < b.rest);
};

}  // namespace

NextUse::NextUse(const NextUseOptions& options) : decay_(std::exp2(-1.0 / options.half_life)) {}

void NextUse::add(EntryId entry, const EntryInfo& info) {
    if (entry >= entries_.size()) entries_.resize(entry + 1);
    if (info.frames == 0) return;
    Entry& added = entries_[entry];
    added.real = true;
    added.record = info.record;
    added.layer = info.layer;
    if (info.layer >= layers_.size()) {
        layers_.resize(info.layer + 1);
        lists_.resize(kStates * layers_.size());
    }
    Layer& layer = layers_[info.layer];
    if (layer.entries.empty()) ++own_layers_;
    layer.entries.push_back(entry);
    cycle_.add_layer(info.layer);
    if (layer.entries.size() == 1) version_ = ~cycle_.version();  // one more list: all must be sorted again
    if (info.record >= record_rank_.size()) {
        record_rank_.resize(info.record + 1, 0);
        record_active_.resize(info.record + 1, 0);
    }
    if (layer.records.empty() || layer.records.back() < info.record) {
        record_rank_[info.record] = static_cast<std::uint32_t>(layer.records.size());
        layer.records.push_back(info.record);
    }
    unsort(info.layer);
}

void NextUse::access(const AccessInfo& info) {
    const std::uint32_t from = cycle_.layers() == 0 ? 0 : cycle_.position();
    const LayerCycle::Pass pass = cycle_.enter(info.phase, info.layer);
    walk(from);
    for (const EntryId entry : pending_) entries_[entry].pending = false;
    pending_.clear();
    for (const EntryId entry : info.entries) {
        if (entry >= entries_.size() || !entries_[entry].real) continue;  // of another layer's cache
        entries_[entry].pending = true;
        pending_.push_back(entry);
    }
    for (const EntryId entry : pending_) unsort(entries_[entry].layer);
    if (info.layer >= layers_.size() || layers_[info.layer].entries.empty()) return;
    Layer& layer = layers_[info.layer];
    unsort(info.layer);
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
    unsort(entries_[entry].layer);
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

void NextUse::rank(std::vector<Ranked>& ranked) {
    std::sort(ranked.begin(), ranked.end(), [](const Ranked& a, const Ranked& b) {
        return a.key > b.key || (a.key == b.key && a.entry < b.entry);
    });
}

void NextUse::unsort(std::uint32_t layer) {
    if (!layers_[layer].sorted) return;
    layers_[layer].sorted = false;
    unsorted_.push_back(layer);
}

void NextUse::sort(std::uint32_t number) {
    Layer& layer = layers_[number];
    List* const lists = &lists_[kStates * number];
    for (const State state : {ACTIVE, IDLE}) {
        lists[state].ranked.clear();
        lists[state].next = lists[state].at = 0;
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
        lists[active ? ACTIVE : IDLE].ranked.push_back(Ranked{key, entry});
    }
    for (const State state : {ACTIVE, IDLE}) {
        rank(lists[state].ranked);
        enter_heap(kStates * number + state);
    }
    layer.sorted = true;
}

// After the program's walk has changed: other passes, other keys.
void NextUse::sort_all() {
    clock_ = 0.0;
    heap_.clear();
    list_of_pass_.assign(cycle_.length(), kNoList);
    for (std::uint32_t number = 0; number < layers_.size(); ++number) {
        if (layers_[number].entries.empty()) continue;
        const std::uint32_t rank = cycle_.rank(number);
        list_of_pass_[rank] = kStates * number + IDLE;
        if (cycle_.trains()) list_of_pass_[2 * cycle_.layers() - 1 - rank] = kStates * number + ACTIVE;
        for (const State state : {ACTIVE, IDLE}) set_pass(kStates * number + state);
        sort(number);
    }
    unsorted_.clear();
    version_ = cycle_.version();
}

// The program was in pass `from`: the passes since then come again in the next cycle.
void NextUse::walk(std::uint32_t from) {
    if (version_ != cycle_.version() || cycle_.layers() == 0) return;  // sort_all() comes first
    const std::uint32_t cycle = cycle_.length();
    const std::uint32_t passed = (cycle_.position() + cycle - from) % cycle;
    clock_ += passed;
    for (std::uint32_t i = 1; i <= passed; ++i) {
        const std::uint32_t list = list_of_pass_[(from + i) % cycle];
        if (list == kNoList) continue;
        set_pass(list);
        enter_heap(list);
    }
}

void NextUse::set_pass(std::uint32_t list) {
    const std::uint32_t layer = list / kStates;
    if (list % kStates == IDLE) {
        lists_[list].pass = clock_ + cycle_.to_forward(layer);
    } else {
        lists_[list].pass = clock_ + (cycle_.trains() ? cycle_.to_backward(layer) : 0);
    }
}

// Pushes the list's entry at `at`, the first one that the present choice has not taken.
void NextUse::enter_heap(std::uint32_t number) {
    List& list = lists_[number];
    ++list.stamp;
    if (list.at >= list.ranked.size()) return;
    // Knuth's TwoSum: sum + rest is pass + key, without rounding.
    const double key = list.ranked[list.at].key;
    const double sum = list.pass + key;
    const double part = sum - list.pass;
    const double rest = (list.pass - (sum - part)) + (key - part);
    heap_.push_back(First{sum, rest, number, list.stamp});
    std::push_heap(heap_.begin(), heap_.end(), kEarlier);
    if (heap_.size() <= 4 * lists_.size() + 64) return;
    std::erase_if(heap_, [this](const First& first) { return lists_[first.list].stamp != first.stamp; });
    std::make_heap(heap_.begin(), heap_.end(), kEarlier);
}

// Takes the largest out of the heap; false if it is empty.
bool NextUse::take_first(First& first) {
    while (!heap_.empty()) {
        std::pop_heap(heap_.begin(), heap_.end(), kEarlier);
        first = heap_.back();
        heap_.pop_back();
        if (lists_[first.list].stamp == first.stamp) return true;
    }
    return false;
}

EntryId NextUse::entry_of(const First& first) const {
    const List& list = lists_[first.list];
    return list.ranked[list.at].entry;
}

double NextUse::distance_of(const First& first) const {
    const List& list = lists_[first.list];
    return (list.pass - clock_) + list.ranked[list.at].key;
}

void NextUse::touch(std::uint32_t list) {
    if (lists_[list].touched) return;
    lists_[list].touched = true;
    touched_.push_back(list);
}

// Like take_first(), but only of evictable entries: the present choice skips all others.
bool NextUse::take_evictable(First& first, const Candidates& candidates) {
    while (take_first(first)) {
        List& list = lists_[first.list];
        const EntryId entry = entry_of(first);
        const bool resident = entries_[entry].resident;
        if (resident && candidates.evictable(entry)) return true;
        if (!resident && list.at == list.next) ++list.next;
        ++list.at;
        touch(first.list);
        enter_heap(first.list);
    }
    return false;
}

std::uint64_t NextUse::choose(const Candidates& candidates, std::uint64_t frames,
                              std::vector<EntryId>& victims) {
    std::uint64_t freed = 0;
    First chosen{};
    while (freed < frames && take_evictable(chosen, candidates)) {
        const double distance = distance_of(chosen);
        // What comes later in the heap is no farther, but may be as far when rounded.
        ties_.clear();
        First other{};
        while (take_evictable(other, candidates)) {
            const bool tie = distance_of(other) == distance;
            if (tie && entry_of(other) < entry_of(chosen)) std::swap(other, chosen);
            ties_.push_back(other);
            if (!tie) break;
        }
        for (const First& first : ties_) {
            heap_.push_back(first);
            std::push_heap(heap_.begin(), heap_.end(), kEarlier);
        }
        const EntryId entry = entry_of(chosen);
        victims.push_back(entry);
        freed += candidates.frames[entry];
        ++lists_[chosen.list].at;
        touch(chosen.list);
        enter_heap(chosen.list);
    }
    for (const std::uint32_t list : touched_) {
        lists_[list].at = lists_[list].next;
        lists_[list].touched = false;
        enter_heap(list);
    }
    touched_.clear();
    return freed;
}

// What is announced goes last: it is needed within a pass.
std::uint64_t NextUse::choose_announced(const Candidates& candidates, std::uint64_t frames,
                                        std::vector<EntryId>& victims) {
    announced_.clear();
    for (const EntryId entry : pending_) {
        const Entry& of = entries_[entry];
        if (of.pending && of.resident && candidates.evictable(entry)) {
            announced_.push_back(Ranked{phase_of(of), entry});
        }
    }
    rank(announced_);
    std::uint64_t freed = 0;
    for (const Ranked& ranked : announced_) {
        if (freed >= frames) break;
        victims.push_back(ranked.entry);
        freed += candidates.frames[ranked.entry];
    }
    return freed;
}

std::uint64_t NextUse::select(const Candidates& candidates, std::uint64_t frames,
                              std::vector<EntryId>& victims) {
    if (version_ != cycle_.version()) sort_all();
    for (const std::uint32_t layer : unsorted_) sort(layer);
    unsorted_.clear();
    const std::uint64_t freed = choose(candidates, frames, victims);
    if (freed < frames) choose_announced(candidates, frames - freed, victims);
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
