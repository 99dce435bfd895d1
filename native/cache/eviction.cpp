// The half of Residency that makes room: evictions for demanded entries, holds for prefetched ones.
#include "native/cache/residency.hpp"

namespace tierstore {

void Residency::tell_policy(Domain& domain, EntryId entry) {
    domain.policy->insert(entry);
    flags_[entry] |= KNOWN;
}

void Residency::pin_entry(Domain& domain, EntryId entry) {
    // A hold ends when its entry is requested. The policy learns of the request in request().
    if (held(entry)) unhold(entry);
    if (pins(entry) == 0) domain.pinned += frames_[entry];
    if (busy_[entry] == 0) domain.busy += frames_[entry];
    ++busy_[entry];
}

void Residency::unpin_entry(EntryId entry) {
    --busy_[entry];
    Domain& domain = domain_of(entry);
    if (pins(entry) == 0) domain.pinned -= frames_[entry];
    if (busy_[entry] == 0) domain.busy -= frames_[entry];
}

// Makes the entry non-resident. Its backing copy, if any, stays.
void Residency::leave(Domain& domain, EntryId entry) {
    if (held(entry)) unhold(entry);
    if ((flags_[entry] & FRESH) != 0) stats_.wasted_prefetch_bytes += bytes_[entry];
    if ((flags_[entry] & KNOWN) != 0) domain.policy->remove(entry);
    flags_[entry] &= STORED;
    domain.used -= frames_[entry];
}

void Residency::evict(Domain& domain, EntryId entry, Decided& decided) {
    const bool dirty = (flags_[entry] & DIRTY) != 0;
    leave(domain, entry);
    ++stats_.evictions;
    if (dirty) {
        flags_[entry] |= STORED;
        ++stats_.write_backs;
        stats_.written_bytes += bytes_[entry];
    }
    decided.add(dirty ? Decision::EVICT_WRITE : Decision::EVICT, entry);
}

void Residency::drop_entry(EntryId entry, Decided& decided) {
    if ((flags_[entry] & (RESIDENT | STORED)) == 0) return;
    if ((flags_[entry] & RESIDENT) != 0) leave(domain_of(entry), entry);
    flags_[entry] = 0;
    ++stats_.drops;
    decided.add(Decision::DROP, entry);
}

// Evicts what the policy names until `frames` are free. False if that was not enough.
bool Residency::make_room(Domain& domain, std::uint64_t frames, Decided& decided) {
    if (domain.used + frames <= domain.limit) return true;
    victims_.clear();
    const Candidates candidates{frames_.data(), busy_.data()};
    stats_.starved += domain.policy->select(candidates, domain.used + frames - domain.limit, victims_);
    for (const EntryId victim : victims_) evict(domain, victim, decided);
    return domain.used + frames <= domain.limit;
}

// Demanded entries come before guessed ones: releases holds, the newest first.
void Residency::cancel_holds_for(Domain& domain, std::uint64_t frames, Decided& decided) {
    for (std::size_t at = holds_.size(); at-- > 0 && domain.used + frames > domain.limit;) {
        if (at >= holds_.size()) continue;  // eviction swept the end of the list
        const EntryId entry = holds_[at];
        if (entry == kNobody || pins(entry) != 0 || &domain_of(entry) != &domain) continue;
        evict(domain, entry, decided);
    }
}

std::uint32_t Residency::prefetch(Phase phase, std::uint32_t layer, std::span<const std::uint32_t> records,
                                  std::span<const std::uint16_t> flags, Decided& decided) {
    check_units(layer, records, flags, Check::PREFETCH);
    if (observer_) observer_->before_event();
    const std::uint32_t covered = hold_units(domain_for(layer), records, flags, decided);
    tell(EventKind::PREFETCH, records, flags, phase, layer);
    return covered;
}

std::uint32_t Residency::hold_units(Domain& domain, std::span<const std::uint32_t> records,
                                    std::span<const std::uint16_t> units, Decided& decided) {
    if (options_.lookahead_frames == 0) return 0;
    for (std::uint32_t unit = 0; unit < records.size(); ++unit) {
        bool covered = true;
        each_needed(records[unit], units[unit],
                    [&](EntryId entry) { covered = covered && hold(domain, entry, decided); });
        if (!covered) return unit;
    }
    return static_cast<std::uint32_t>(records.size());
}

bool Residency::hold(Domain& domain, EntryId entry, Decided& decided) {
    const bool resident = (flags_[entry] & RESIDENT) != 0;
    if (held(entry)) return true;
    if (!resident) {
        if ((flags_[entry] & STORED) == 0) return true;  // nothing to read ahead
        const std::uint32_t frames = frames_[entry];
        if (fresh_held_frames_ + frames > options_.lookahead_frames) return false;
        // Checks before it evicts: a guess that does not fit must evict nothing.
        if (domain.busy + frames > domain.limit) return false;
        domain.policy->miss(entry);
        make_room(domain, frames, decided);
        domain.used += frames;
        flags_[entry] |= RESIDENT | FRESH;
        stats_.read_bytes += bytes_[entry];
        stats_.prefetch_read_bytes += bytes_[entry];
        ++stats_.prefetch_reads;
        decided.add(Decision::FETCH, entry);
    }
    if (busy_[entry] == 0) domain.busy += frames_[entry];
    busy_[entry] |= kHeld;
    hold_slot_[entry] = static_cast<std::uint32_t>(holds_.size());
    holds_.push_back(entry);
    if ((flags_[entry] & FRESH) != 0) fresh_held_frames_ += frames_[entry];
    return true;
}

void Residency::release(EntryId entry) {
    busy_[entry] &= ~kHeld;
    if (busy_[entry] == 0) domain_of(entry).busy -= frames_[entry];
}

void Residency::unhold(EntryId entry) {
    release(entry);
    if ((flags_[entry] & FRESH) != 0) fresh_held_frames_ -= frames_[entry];
    holds_[hold_slot_[entry]] = kNobody;
    while (!holds_.empty() && holds_.back() == kNobody) holds_.pop_back();
}

void Residency::cancel_prefetch() {
    release_holds();
    tell(EventKind::CANCEL);
}

void Residency::release_holds() {
    const std::vector<EntryId> released = std::move(holds_);
    holds_.clear();
    for (const EntryId entry : released) {
        if (entry == kNobody) continue;
        release(entry);
        // It was never requested. From now on it can be a victim, so the policy must know it.
        if ((flags_[entry] & KNOWN) == 0) tell_policy(domain_of(entry), entry);
    }
    fresh_held_frames_ = 0;
}

}  // namespace tierstore
