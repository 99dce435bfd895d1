#include "native/cache/residency.hpp"

#include <algorithm>
#include <numeric>

namespace tierstore {
namespace {

std::string capacity_message(std::uint64_t needed, std::uint64_t available) {
    return std::to_string(needed) + " frames must be resident at once, and only " +
           std::to_string(available) + " can be";
}

std::uint16_t bits(std::uint16_t flags, std::uint16_t shift) { return (flags >> shift) & kGroupMask; }

}  // namespace

CapacityError::CapacityError(std::uint64_t needed, std::uint64_t available)
    : std::invalid_argument(capacity_message(needed, available)), needed_(needed) {}

Residency::Residency(const ResidencyOptions& options) : options_(options) {
    const bool by_layer = options.scope == Scope::LAYER;
    if (by_layer == options.layer_quotas.empty()) {
        throw std::invalid_argument("layer quotas belong to layer scope, one for each layer");
    }
    std::uint64_t total = 0;
    for (const std::uint64_t quota : options.layer_quotas) total += quota;
    if (total > options.capacity_frames) {
        throw std::invalid_argument("the layers' quotas are " + std::to_string(total) +
                                    " frames, the capacity " + std::to_string(options.capacity_frames));
    }
    if (options.lookahead_frames > options.capacity_frames) {
        throw std::invalid_argument("a lookahead of " + std::to_string(options.lookahead_frames) +
                                    " frames is more than the capacity of " +
                                    std::to_string(options.capacity_frames));
    }
    if (options.parts == 0) throw std::invalid_argument("parts must be at least 1");
    domains_.resize(by_layer ? options.layer_quotas.size() : 1);
    for (std::size_t i = 0; i < domains_.size(); ++i) {
        Domain& domain = domains_[i];
        domain.policy = options.make(options.policy, options.policy_options);
        const std::uint64_t frames = by_layer ? options.layer_quotas[i] : options.capacity_frames;
        const std::uint64_t headroom = domain.policy->headroom_frames();
        domain.limit = frames > headroom ? frames - headroom : 0;
        domain.policy->set_capacity(domain.limit);
        domain.lookahead = options.lookahead_frames / domains_.size();
    }
}

void Residency::observe(std::shared_ptr<ResidencyObserver> observer) {
    if (observer && record_count() > 0) {
        throw std::logic_error("an observer comes before the first record");
    }
    observer_ = std::move(observer);
}

void Residency::start_at(std::uint32_t step) {
    if (stats_.accesses > 0 || stats_.steps > 0) {
        throw std::logic_error("steps are numbered before the first access");
    }
    step_ = step;
}

// Reports the units that have ended as one event, before the next event. Units that end with their group are implied
// by its end and not reported.
void Residency::tell_observer(Event event) {
    if (access_open_ && event.kind != EventKind::ACCESS) event.at = 2 * groups_begun_ + (group_open_ ? 0 : 1);
    if (!ended_.empty()) {
        observer_->on_event(
            Event{.kind = EventKind::END_UNIT, .at = event.at, .step = event.step, .records = ended_});
        ended_.clear();
    }
    observer_->on_event(event);
}

std::uint32_t Residency::add_record(const RecordInfo& info) {
    const std::uint32_t layer = info.layer;
    if (options_.scope == Scope::LAYER && layer >= domains_.size()) {
        throw std::invalid_argument("layer " + std::to_string(layer) + " has no quota: there are " +
                                    std::to_string(domains_.size()));
    }
    if (layer > 0xffff) throw std::invalid_argument("layers are numbered up to 65535");
    const std::uint32_t record = record_count();
    layer_of_.push_back(layer);
    for (std::uint32_t group = 0; group < kGroupStride; ++group) {
        const bool real = group < kGroups;
        frames_.push_back(real ? info.frames[group] : 0);
        bytes_.push_back(real ? info.bytes[group] : 0);
        busy_.push_back(0);
        flags_.push_back(0);
        hold_slot_.push_back(0);
    }
    if (layer >= stats_.by_layer.size()) stats_.by_layer.resize(layer + 1);
    mark_stored(record, info.stored);
    for (std::uint32_t group = 0; group < kGroups; ++group) {
        const EntryInfo entry{record, group, layer, info.frames[group]};
        domain_for(layer).policy->add(record * kGroupStride + group, entry);
    }
    if (observer_) {
        tell_observer(
            Event{.kind = EventKind::ADD, .step = step_, .records = std::span(&record, 1), .added = &info});
    }
    return record;
}

void Residency::set_stored(std::uint32_t record, std::uint16_t mask) {
    if (record >= record_count()) throw std::invalid_argument("no record " + std::to_string(record));
    mark_stored(record, mask);
    tell(EventKind::SET_STORED, std::span(&record, 1), std::span(&mask, 1));
}

void Residency::mark_stored(std::uint32_t record, std::uint16_t mask) {
    for (std::uint32_t group = 0; group < kGroups; ++group) {
        std::uint8_t& flags = flags_[record * kGroupStride + group];
        flags = static_cast<std::uint8_t>((flags & ~STORED) | ((mask >> group & 1) != 0 ? STORED : 0));
    }
}

void Residency::check_units(std::uint32_t layer, std::span<const std::uint32_t> records,
                            std::span<const std::uint16_t> flags, Check check) const {
    if (records.size() != flags.size()) throw std::invalid_argument("records and flags differ in length");
    const bool by_layer = options_.scope == Scope::LAYER && check != Check::RECORDS;
    if (by_layer && layer >= domains_.size())
        throw std::invalid_argument("no layer " + std::to_string(layer));
    const bool given = options_.order == GroupOrder::GIVEN;
    if (given && check == Check::ACCESS) {
        std::vector<std::uint32_t> sorted(records.begin(), records.end());
        std::sort(sorted.begin(), sorted.end());
        if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
            throw std::invalid_argument("records must be distinct");
        }
    }
    for (std::size_t i = 0; i < records.size(); ++i) {
        if (records[i] >= record_count()) {
            throw std::invalid_argument("no record " + std::to_string(records[i]));
        }
        const bool ascends = i == 0 || records[i] > records[i - 1];
        if (check != Check::PREFETCH && !ascends && !(check == Check::ACCESS && given)) {
            throw std::invalid_argument("records must be strictly ascending");
        }
        if (by_layer && layer_of_[records[i]] != layer) {
            throw std::invalid_argument("record " + std::to_string(records[i]) + " is not of layer " +
                                        std::to_string(layer) + ", and the scope is the layer");
        }
        const std::uint16_t need = bits(flags[i], kNeedShift);
        const std::uint16_t touched = bits(flags[i], kDirtyShift) | bits(flags[i], kDropShift);
        if (need == 0 || (touched & ~need) != 0 ||
            (check != Check::ACCESS && flags[i] >> kSequencesShift != 0)) {
            throw std::invalid_argument("record " + std::to_string(records[i]) + ": flags " +
                                        std::to_string(flags[i]) +
                                        " must need a group, and dirty or drop only what they need");
        }
    }
}

// ---- accesses

const std::vector<std::uint32_t>& Residency::begin_access(Phase phase, std::uint32_t layer,
                                                          std::span<const std::uint32_t> records,
                                                          std::span<const std::uint16_t> flags) {
    if (access_open_) throw std::logic_error("an access is open already");
    check_units(layer, records, flags, Check::ACCESS);
    if (observer_) observer_->before_event();
    records_.assign(records.begin(), records.end());
    units_.assign(flags.begin(), flags.end());
    unit_at_.resize(records.size());
    std::iota(unit_at_.begin(), unit_at_.end(), 0u);
    place_of_ = unit_at_;
    access_layer_ = layer;
    split(domain_for(layer), phase);
    unit_ended_.assign(records.size(), 0);
    groups_begun_ = 0;
    access_open_ = !records_.empty();
    ++stats_.accesses;
    counts_access_ = false;
    if (clock() != StepClock::STEPS && !records.empty() && phase != Phase::INIT &&
        phase != Phase::OPTIMIZER) {
        counts_access_ = options_.clock == StepClock::ACCESSES || clocked_ >= record_count();
        ++clocked_;
    }
    if (domains_.front().policy->follows_accesses()) announce(phase, records, flags);
    tell(EventKind::ACCESS, records, flags, phase, layer);
    return bounds_;
}

void Residency::split(Domain& domain, Phase phase) {
    // What is pinned already, by this access's entries too, stays so through all of its groups: a group adds
    // the frames of the rest.
    const auto added = [&](std::size_t place) {
        std::uint64_t frames = 0;
        each_needed(records_[place], units_[place], [&](EntryId entry) {
            if (pins(entry) == 0) frames += frames_[entry];
        });
        return frames;
    };
    std::uint64_t largest = 0;
    std::uint64_t total = 0;
    for (std::size_t place = 0; place < records_.size(); ++place) {
        largest = std::max(largest, added(place));
        total += added(place);
    }
    std::uint64_t room = domain.limit > domain.pinned ? domain.limit - domain.pinned : 0;
    if (largest > room) refuse_capacity(domain, largest);
    if (records_.size() > 1) {
        room = std::max(largest, room > domain.lookahead ? room - domain.lookahead : 0);
    }
    const bool changes = std::any_of(units_.begin(), units_.end(),
                                     [](std::uint16_t unit) { return bits(unit, kDirtyShift) != 0; });
    const bool pass = phase == Phase::FORWARD || phase == Phase::BACKWARD;
    if (changes && pass) room = std::min(room, domain.limit / options_.parts);
    if (total > room && options_.order == GroupOrder::RESIDENT_FIRST) serve_residents_first();
    bounds_.assign(1, 0);
    std::uint64_t filled = 0;
    for (std::uint32_t place = 0; place < records_.size(); ++place) {
        if (place > bounds_.back() && filled + added(place) > room) {
            bounds_.push_back(place);
            filled = 0;
        }
        filled += added(place);
    }
    if (!records_.empty()) bounds_.push_back(static_cast<std::uint32_t>(records_.size()));
}

void Residency::serve_residents_first() {
    std::vector<std::uint8_t> rank(records_.size());  // by unit: 0 all resident, 1 some of it, 2 nothing
    for (std::size_t unit = 0; unit < records_.size(); ++unit) {
        bool any = false;
        bool all = true;
        each_needed(records_[unit], units_[unit], [&](EntryId entry) {
            const bool resident = (flags_[entry] & RESIDENT) != 0;
            any = any || resident;
            all = all && resident;
        });
        rank[unit] = all ? 0 : any ? 1 : 2;
    }
    std::stable_sort(unit_at_.begin(), unit_at_.end(),
                     [&](std::uint32_t left, std::uint32_t right) { return rank[left] < rank[right]; });
    const std::vector<std::uint32_t> records = records_;
    const std::vector<std::uint16_t> units = units_;
    for (std::uint32_t place = 0; place < unit_at_.size(); ++place) {
        records_[place] = records[unit_at_[place]];
        units_[place] = units[unit_at_[place]];
        place_of_[unit_at_[place]] = place;
    }
}

void Residency::announce(Phase phase, std::span<const std::uint32_t> records,
                         std::span<const std::uint16_t> flags) {
    announced_.clear();
    requesters_.clear();
    bool any = false;
    for (std::size_t i = 0; i < records.size(); ++i) {
        each_needed(records[i], flags[i], [&](EntryId entry) {
            announced_.push_back(entry);
            requesters_.push_back(static_cast<std::uint8_t>(flags[i] >> kSequencesShift));
        });
        any = any || flags[i] >> kSequencesShift != 0;
    }
    if (!any) requesters_.clear();
    for (Domain& domain : domains_)
        domain.policy->access(AccessInfo{phase, access_layer_, announced_, requesters_});
}

void Residency::refuse_capacity(const Domain& domain, std::uint64_t added) const {
    const std::uint64_t headroom = domain.policy->headroom_frames();
    throw CapacityError(added + domain.pinned + headroom, domain.limit + headroom);
}

std::span<const std::uint32_t> Residency::next_group(Decided& demanded, Decided& ahead) {
    if (!access_open_ || group_open_) {
        throw std::logic_error(group_open_ ? "a group is open already" : "no access is open");
    }
    const std::uint32_t begin = bounds_[groups_begun_];
    const std::uint32_t end = bounds_[groups_begun_ + 1];
    Domain& domain = domain_for(access_layer_);
    std::uint64_t added = 0;
    std::uint64_t missing = 0;
    for (std::uint32_t place = begin; place < end; ++place) {
        each_needed(records_[place], units_[place], [&](EntryId entry) {
            if (pins(entry) == 0) added += frames_[entry];
            if ((flags_[entry] & RESIDENT) == 0) missing += frames_[entry];
        });
    }
    if (added + domain.pinned > domain.limit) refuse_capacity(domain, added);
    // All are pinned before anything is evicted: none of the group's entries evicts another.
    for (std::uint32_t place = begin; place < end; ++place) {
        each_needed(records_[place], units_[place], [&](EntryId entry) {
            pin_entry(domain, entry);
            if ((flags_[entry] & RESIDENT) == 0) domain.policy->miss(entry);
        });
    }
    if (!make_room(domain, missing, demanded)) cancel_holds_for(domain, missing, demanded);
    for (std::uint32_t place = begin; place < end; ++place) {
        each_needed(records_[place], units_[place], [&](EntryId entry) { request(domain, entry, demanded); });
    }
    ++groups_begun_;
    ++stats_.groups;
    group_open_ = true;
    const std::span<const std::uint32_t> records(records_);
    hold_units(domain, records.subspan(end), std::span<const std::uint16_t>(units_).subspan(end), ahead);
    return std::span<const std::uint32_t>(unit_at_).subspan(begin, end - begin);
}

void Residency::request(Domain& domain, EntryId entry, Decided& decided) {
    std::uint8_t& flags = flags_[entry];
    HitCounts& layer = stats_.by_layer[layer_of_[entry / kGroupStride]];
    HitCounts& group = stats_.by_group[entry % kGroupStride];
    if ((flags & RESIDENT) != 0) {
        ++stats_.hits, ++layer.hits, ++group.hits;
        if ((flags & FRESH) != 0) {
            stats_.useful_prefetch_bytes += bytes_[entry];
            flags &= static_cast<std::uint8_t>(~FRESH);
        }
        if ((flags & KNOWN) != 0) {
            domain.policy->hit(entry);
        } else {
            tell_policy(domain, entry);
        }
        decided.add(Decision::HIT, entry);
    } else {
        flags |= RESIDENT;
        domain.used += frames_[entry];
        tell_policy(domain, entry);
        if ((flags & STORED) != 0) {
            ++stats_.misses, ++layer.misses, ++group.misses;
            stats_.read_bytes += bytes_[entry];
            decided.add(Decision::FETCH, entry);
        } else {
            ++stats_.creates;
            decided.add(Decision::CREATE, entry);
        }
    }
    domain.policy->tick(Clock::REQUEST);
}

void Residency::end_unit(std::uint32_t unit, Decided& decided) {
    if (!group_open_) throw std::logic_error("no group is open");
    if (!in_open_group(unit)) {
        throw std::invalid_argument("unit " + std::to_string(unit) + " is not of the open group");
    }
    const std::uint32_t place = place_of_[unit];
    if (unit_ended_[place] != 0)
        throw std::logic_error("unit " + std::to_string(unit) + " has ended already");
    unit_ended_[place] = 1;
    finish(records_[place], units_[place], decided);
    if (observer_) ended_.push_back(unit);
}

bool Residency::group_ended() const {
    const auto first = unit_ended_.begin();
    return std::all_of(first + bounds_[groups_begun_ - 1], first + bounds_[groups_begun_],
                       [](std::uint8_t ended) { return ended != 0; });
}

void Residency::end_group(Decided& decided) {
    if (!group_open_) throw std::logic_error("no group is open");
    for (std::uint32_t place = bounds_[groups_begun_ - 1]; place < bounds_[groups_begun_]; ++place) {
        if (unit_ended_[place] == 0) finish(records_[place], units_[place], decided);
        unit_ended_[place] = 1;
    }
    group_open_ = false;
    access_open_ = groups_begun_ < group_count();
    ended_.clear();
    if (access_open_ || !counts_access_) return;
    counted_accesses_ = true;
    tick_step();
}

void Residency::finish(std::uint32_t record, std::uint16_t unit, Decided& decided) {
    each_needed(record, unit, [&](EntryId entry) {
        const std::uint32_t group = entry % kGroupStride;
        if ((unit >> (kDirtyShift + group) & 1) != 0) flags_[entry] |= DIRTY;
        unpin_entry(entry);
        // Another pin means that the entry is still in use: its last unpin drops it.
        if ((unit >> (kDropShift + group) & 1) != 0 && pins(entry) == 0) drop_entry(entry, decided);
    });
}

// ---- pins across accesses

void Residency::pin(std::span<const std::uint32_t> records, std::span<const std::uint16_t> flags) {
    check_units(0, records, flags, Check::RECORDS);
    for (std::size_t i = 0; i < records.size(); ++i) {
        each_needed(records[i], flags[i], [&](EntryId entry) {
            if ((flags_[entry] & RESIDENT) == 0) {
                throw std::logic_error("entry " + std::to_string(entry) +
                                       " is not resident: pin it in its access");
            }
        });
    }
    for (std::size_t i = 0; i < records.size(); ++i) {
        each_needed(records[i], flags[i], [&](EntryId entry) { pin_entry(domain_of(entry), entry); });
    }
    tell(EventKind::PIN, records, flags);
}

void Residency::unpin(std::span<const std::uint32_t> records, std::span<const std::uint16_t> flags,
                      Decided& decided) {
    check_units(0, records, flags, Check::RECORDS);
    for (std::size_t i = 0; i < records.size(); ++i) {
        each_needed(records[i], flags[i], [&](EntryId entry) {
            if (pins(entry) == 0) throw std::logic_error("entry " + std::to_string(entry) + " is not pinned");
        });
    }
    for (std::size_t i = 0; i < records.size(); ++i) finish(records[i], flags[i], decided);
    tell(EventKind::UNPIN, records, flags);
}

std::vector<std::uint8_t> Residency::keep(std::span<const std::uint32_t> records,
                                          std::span<const std::uint16_t> flags) {
    check_units(0, records, flags, Check::RECORDS);
    std::vector<std::uint8_t> kept(records.size());
    for (std::size_t i = 0; i < records.size(); ++i) {
        Domain& domain = domain_for(layer_of_[records[i]]);
        bool resident = true;
        std::uint64_t added = 0;
        each_needed(records[i], flags[i], [&](EntryId entry) {
            resident = resident && (flags_[entry] & RESIDENT) != 0;
            if (pins(entry) == 0) added += frames_[entry];
        });
        if (!resident || domain.pinned + added >= domain.limit) continue;
        each_needed(records[i], flags[i], [&](EntryId entry) {
            if ((flags_[entry] & KEPT) == 0) pin_entry(domain, entry);
            flags_[entry] |= KEPT;
        });
        kept[i] = 1;
    }
    tell(EventKind::KEEP, records, flags);
    return kept;
}

void Residency::release(std::span<const std::uint32_t> records, std::span<const std::uint16_t> flags) {
    check_units(0, records, flags, Check::RECORDS);
    for (std::size_t i = 0; i < records.size(); ++i) {
        each_needed(records[i], flags[i], [&](EntryId entry) {
            if ((flags_[entry] & KEPT) != 0) unpin_entry(entry);
            flags_[entry] = static_cast<std::uint8_t>(flags_[entry] & ~KEPT);
        });
    }
    tell(EventKind::RELEASE, records, flags);
}

// ---- write-back, drop, the clock

void Residency::clean_entry(EntryId entry, Decided& decided) {
    if (entry % kGroupStride == kGradients || (flags_[entry] & DIRTY) == 0 || pins(entry) != 0) return;
    flags_[entry] = static_cast<std::uint8_t>((flags_[entry] & ~DIRTY) | STORED);
    ++stats_.write_backs;
    stats_.written_bytes += bytes_[entry];
    decided.add(Decision::WRITE_BACK, entry);
}

void Residency::clean(std::span<const std::uint32_t> records, Decided& decided) {
    for (const std::uint32_t record : records) {
        if (record >= record_count()) throw std::invalid_argument("no record " + std::to_string(record));
    }
    for (const std::uint32_t record : records) {
        for (std::uint32_t group = 0; group < kGradients; ++group) {
            clean_entry(record * kGroupStride + group, decided);
        }
    }
    tell(EventKind::CLEAN, records);
}

void Residency::clean_all(Decided& decided) {
    for (EntryId entry = 0; entry < flags_.size(); ++entry) clean_entry(entry, decided);
    tell(EventKind::CLEAN_ALL);
}

void Residency::drop(std::span<const EntryId> entries, Decided& decided) {
    for (const EntryId entry : entries) {
        check_entry(entry);
        if (pins(entry) != 0) throw std::logic_error("entry " + std::to_string(entry) + " is pinned");
    }
    for (const EntryId entry : entries) drop_entry(entry, decided);
    tell(EventKind::DROP, entries);
}

void Residency::end_step() {
    if (access_open_) throw std::logic_error("an access is open");
    if (observer_) observer_->before_event();
    release_holds();
    tick_step();
    ++stats_.steps;
    ++step_;
    tell(EventKind::END_STEP);
}

void Residency::tick_step() {
    for (Domain& domain : domains_) domain.policy->tick(Clock::STEP);
}

// ---- looking at it

ResidencyStats Residency::stats() const { return stats_; }

void Residency::check_entry(EntryId entry) const {
    if (entry >= flags_.size() || entry % kGroupStride >= kGroups) {
        throw std::invalid_argument("no entry " + std::to_string(entry));
    }
}

EntryState Residency::state(EntryId entry) const {
    check_entry(entry);
    const std::uint8_t flags = flags_[entry];
    return EntryState{(flags & RESIDENT) != 0, (flags & DIRTY) != 0, (flags & STORED) != 0, held(entry),
                      pins(entry)};
}

std::vector<EntryId> Residency::resident_entries() const { return entries_with(RESIDENT); }

std::vector<EntryId> Residency::dirty_entries() const { return entries_with(DIRTY); }

std::vector<EntryId> Residency::entries_with(std::uint8_t flag) const {
    std::vector<EntryId> found;
    for (EntryId entry = 0; entry < flags_.size(); ++entry) {
        if ((flags_[entry] & flag) != 0) found.push_back(entry);
    }
    return found;
}

bool Residency::policy_failed() const {
    return std::any_of(domains_.begin(), domains_.end(),
                       [](const Domain& domain) { return domain.policy->failed(); });
}

std::uint64_t Residency::used_frames() const {
    std::uint64_t used = 0;
    for (const Domain& domain : domains_) used += domain.used;
    return used;
}

}  // namespace tierstore
