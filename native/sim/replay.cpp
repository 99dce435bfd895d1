#include "native/sim/replay.hpp"

#include <string>

namespace tierstore {

void Replay::run(const TraceColumns& trace) {
    for (std::size_t i = 0; i < trace.kinds.size(); ++i, ++events_) {
        const std::uint64_t begin = trace.offsets[i];
        const std::uint64_t count = trace.offsets[i + 1] - begin;
        try {
            if (trace.kinds[i] >= kEventKinds) {
                throw std::invalid_argument("unknown kind " + std::to_string(trace.kinds[i]));
            }
            if (trace.at[i] == 0) {
                finish();
            } else {
                advance_to(trace.at[i]);
            }
            apply(static_cast<EventKind>(trace.kinds[i]), static_cast<Phase>(trace.phases[i]),
                  trace.layers[i], trace.records.subspan(begin, count), trace.flags.subspan(begin, count));
        } catch (const CapacityError&) {
            throw;
        } catch (const std::logic_error& error) {
            throw std::invalid_argument("event " + std::to_string(events_) + ": " + error.what());
        }
        decided_.clear();
        ahead_.clear();
    }
}

void Replay::finish() {
    while (residency_.access_open()) {
        if (!residency_.group_open()) residency_.next_group(decided_, ahead_);
        end_group();
        decided_.clear();
        ahead_.clear();
    }
}

// With another capacity there may be fewer groups than there were: then the last one stands for the rest.
void Replay::advance_to(std::uint32_t at) {
    if (unit_by_unit_) return advance_unit_by_unit(at);
    const std::uint32_t groups = residency_.group_count();
    const std::uint32_t wanted = at / 2 < groups ? at / 2 : groups;
    const bool open = at % 2 == 0;
    while (residency_.access_open() && residency_.groups_begun() < wanted) {
        if (residency_.group_open()) end_group();
        residency_.next_group(decided_, ahead_);
    }
    if (!open && residency_.group_open()) end_group();
}

// A group is over when its units are, wherever the recorded run cut its groups.
void Replay::advance_unit_by_unit(std::uint32_t at) {
    const bool open = at % 2 == 0;
    const bool moved = at / 2 != group_;
    group_ = at / 2;
    if (residency_.group_open() && (moved || !open) && residency_.group_ended()) end_group();
    if (residency_.access_open() && open && moved && !residency_.group_open()) {
        residency_.next_group(decided_, ahead_);
    }
}

void Replay::end_group() { residency_.end_group(decided_); }

void Replay::end_units(std::span<const std::uint32_t> units) {
    for (const std::uint32_t unit : units) {
        while (unit_by_unit_ && residency_.access_open() &&
               (!residency_.group_open() || residency_.group_ended())) {
            if (residency_.group_open()) end_group();
            if (residency_.access_open()) residency_.next_group(decided_, ahead_);
        }
        if (residency_.group_open() && residency_.can_end(unit)) residency_.end_unit(unit, decided_);
    }
}

void Replay::add(std::span<const std::uint32_t> records) {
    for (const std::uint32_t record : records) {
        if (record != residency_.record_count() || record - first_late_ >= late_.size()) {
            throw std::invalid_argument("record " + std::to_string(record) + " cannot be added: there are " +
                                        std::to_string(residency_.record_count()) + " of " +
                                        std::to_string(first_late_ + late_.size()));
        }
        residency_.add_record(late_[record - first_late_]);
    }
}

void Replay::apply(EventKind kind, Phase phase, std::uint32_t layer, std::span<const std::uint32_t> records,
                   std::span<const std::uint16_t> flags) {
    switch (kind) {
        case EventKind::ACCESS:
            residency_.begin_access(phase, layer, records, flags);
            group_ = 0;
            break;
        case EventKind::PREFETCH: residency_.prefetch(phase, layer, records, flags, decided_); break;
        case EventKind::CANCEL: residency_.cancel_prefetch(); break;
        case EventKind::CLEAN: residency_.clean(records, decided_); break;
        case EventKind::CLEAN_ALL: residency_.clean_all(decided_); break;
        case EventKind::DROP: residency_.drop(records, decided_); break;
        case EventKind::SET_STORED:
            for (std::size_t i = 0; i < records.size(); ++i) residency_.set_stored(records[i], flags[i]);
            break;
        case EventKind::PIN: residency_.pin(records, flags); break;
        case EventKind::UNPIN: residency_.unpin(records, flags, decided_); break;
        case EventKind::END_UNIT: end_units(records); break;
        case EventKind::END_STEP: residency_.end_step(); break;
        case EventKind::ADD: add(records); break;
        case EventKind::KEEP:
            unit_by_unit_ = true;
            residency_.keep(records, flags);
            break;
        case EventKind::RELEASE: residency_.release(records, flags); break;
    }
}

}  // namespace tierstore
