// The loop of the simulator, for any policy class: if that is final, its calls are direct.
#pragma once

#include <algorithm>
#include <memory>
#include <numeric>
#include <span>
#include <stdexcept>
#include <vector>

#include "native/sim/columns.hpp"
#include "native/sim/simulate.hpp"

namespace tierstore {

// BEFORE: a requested entry is always admitted, and room is made for it first. AFTER: it passes through a separate
// buffer and then competes with the others for a place; sets of any size fit.
enum class Room : std::uint8_t { BEFORE, AFTER };

// What a simulation knows of requests, entries and results, whatever the policy. What is hot is inline; the rest would
// otherwise be compiled for each policy.
class SimulationState {
protected:
    // Flags of an entry. IN_SET: requested by the open group. FRESH: fetched by it, and not admitted yet. BYPASS: too
    // large to be admitted for the next request.
    enum Flag : std::uint8_t { RESIDENT = 1, DIRTY = 2, IN_SET = 4, FRESH = 8, STAYS = 16, BYPASS = 32 };

    SimulationState(const RequestColumns& requests, const SimulationOptions& options,
                    std::uint32_t entry_count, std::span<const std::uint32_t> layer_of);

    std::uint32_t size_of(EntryId entry) const { return unit_sizes_ ? 1 : frames_[entry]; }
    std::uint64_t bytes_of(EntryId entry) const {
        return requests_.bytes.empty() ? size_of(entry) : requests_.bytes[entry];
    }
    std::uint32_t record_of(EntryId entry) const {
        return requests_.records.empty() ? entry : requests_.records[entry];
    }
    std::uint32_t layer_at(std::uint64_t at) const {
        if (!requests_.layers.empty()) return requests_.layers[event_];
        return layer_of_.empty() ? 0 : layer_of_[requests_.entries[at]];
    }

    void count_write_back(EntryId entry) {
        ++counts_.write_backs;
        counts_.written_frames += size_of(entry);
        counts_.written_bytes += bytes_of(entry);
    }

    void close_event();
    void count_step();
    // Counts begin here.
    void count_from_here();
    // As in Residency: records with all requested entries resident, then those with some, then the rest.
    void serve_residents_first();
    // Splitting a set would hide a duplicate entry.
    void check_set(std::uint64_t begin, std::uint64_t end);
    [[noreturn]] void refuse_twice(EntryId entry) const;

    const RequestColumns& requests_;
    const SimulationOptions& options_;
    std::span<const std::uint32_t> layer_of_;
    bool unit_sizes_;
    std::size_t event_ = 0;  // the present one
    std::uint32_t layer_ = 0;
    // By entry.
    std::vector<std::uint8_t> flags_;
    std::vector<std::uint32_t> frames_;
    std::vector<std::uint32_t> busy_;
    std::vector<std::uint64_t> order_;  // of a split set: its requests in the order of service
    std::vector<std::uint8_t> rank_;    // scratch
    SimulationCounts counts_;
    SimulationCounts step_began_;
    SimulationCounts event_began_;
    SimulationResult result_;
};

// One cache: the whole capacity, or one layer's quota.
template <typename P>
struct SimulatedCache {
    std::unique_ptr<P> policy;
    std::uint64_t limit = 0;  // frames that may be used: capacity or quota, less the policy's headroom
    std::uint64_t used = 0;
    std::uint64_t pinned = 0;
};

template <typename P>
class Simulation : SimulationState {
public:
    using Cache = SimulatedCache<P>;

    // layer_of: by entry, or empty. The columns must have been checked.
    Simulation(const RequestColumns& requests, const SimulationOptions& options, std::uint32_t entry_count,
               std::span<const std::uint32_t> layer_of, std::vector<Cache> caches, Room room)
        : SimulationState(requests, options, entry_count, layer_of),
          caches_(std::move(caches)),
          room_(room),
          bypasses_(room == Room::AFTER || options.oversized == Oversized::BYPASS) {}

    SimulationResult run() {
        introduce();
        const auto& steps = requests_.steps;
        const std::size_t events = requests_.events();
        const std::size_t warm = std::min<std::uint64_t>(options_.warmup_events, events);
        unlimited_ = kClairvoyant && warm > 0;
        for (std::size_t begin = 0; begin < events;) {
            std::size_t step_end = events;
            if (!steps.empty()) {
                step_end = std::upper_bound(steps.begin() + begin, steps.end(), steps[begin]) - steps.begin();
            }
            const std::size_t end = begin < warm ? std::min(warm, step_end) : step_end;
            run_events(begin, end);
            if (end == warm) end_warmup();
            if (end == step_end) close_step();
            begin = end;
        }
        result_.counts = counts_;
        return std::move(result_);
    }

private:
    static constexpr bool kClairvoyant = requires { P::kKnowsFuture; };
    static constexpr std::uint64_t kAhead = 16;  // requests between a prefetch and its use

    Cache& cache_for(std::uint32_t layer) { return caches_[options_.scope == Scope::LAYER ? layer : 0]; }

    void introduce() {
        follows_accesses_ = caches_.front().policy->follows_accesses();
        for (Cache& cache : caches_) cache.policy->set_capacity(cache.limit);
        std::uint32_t place = 0;  // among neighbours of one record
        for (EntryId entry = 0; entry < flags_.size(); ++entry) {
            place = entry > 0 && record_of(entry) == record_of(entry - 1) ? place + 1 : 0;
            const std::uint32_t layer = layer_of_.empty() ? 0 : layer_of_[entry];
            if (layer == kNoLayer) continue;
            const std::uint32_t group = requests_.groups.empty() ? place : requests_.groups[entry];
            cache_for(layer).policy->add(entry, EntryInfo{record_of(entry), group, layer, frames_[entry]});
        }
    }

    void run_events(std::size_t begin, std::size_t end) {
        for (std::size_t event = begin; event < end; ++event) {
            const std::uint64_t first = requests_.offsets[event];
            const std::uint64_t last = requests_.offsets[event + 1];
            event_ = event;
            if (first == last) {
                // Nothing is requested, but the program has reached this layer.
                if (requests_.layers.empty() || options_.contract == Contract::SEQUENTIAL) continue;
                layer_ = requests_.layers[event];
                if (follows_accesses_) announce(first, last);
                continue;
            }
            layer_ = layer_at(first);
            if (last - first == 1 || options_.contract == Contract::SEQUENTIAL) {
                for (std::uint64_t at = first; at < last; ++at) run_alone(at);
            } else {
                run_set(first, last);
            }
            if (options_.detail == Detail::EVENTS) close_event();
        }
    }

    void run_alone(std::uint64_t at) {
        prefetch(at);
        if (requests_.layers.empty()) layer_ = layer_at(at);
        Cache& cache = cache_for(layer_);
        const EntryId entry = requests_.entries[at];
        if (follows_accesses_) announce(at, at + 1);
        if ((flags_[entry] & RESIDENT) == 0) {
            if (size_of(entry) > room_of(cache)) {
                bypass(cache, entry, size_of(entry));
            } else {
                cache.policy->miss(entry);
                if (room_ == Room::BEFORE) make_room(cache, size_of(entry));
            }
        }
        request(cache, at);
        if (room_ == Room::AFTER) {
            make_room(cache, 0);
            flags_[entry] &= static_cast<std::uint8_t>(~FRESH);
        }
    }

    void run_set(std::uint64_t begin, std::uint64_t end) {
        Cache& cache = cache_for(layer_);
        if (follows_accesses_) announce(begin, end);
        const auto as_given = [begin](std::uint64_t place) { return begin + place; };
        if (group_end(cache, 0, end - begin, as_given) == end - begin) {
            run_group(cache, 0, end - begin, as_given);
            return;
        }
        check_set(begin, end);
        order_.resize(end - begin);
        std::iota(order_.begin(), order_.end(), begin);
        if (options_.order == GroupOrder::RESIDENT_FIRST) serve_residents_first();
        const auto served = [this](std::uint64_t place) { return order_[place]; };
        for (std::uint64_t first = 0; first < order_.size();) {
            const std::uint64_t last = group_end(cache, first, order_.size(), served);
            run_group(cache, first, last, served);
            first = last;
        }
    }

    // Frames that are not pinned.
    static std::uint64_t room_of(const Cache& cache) {
        return cache.limit > cache.pinned ? cache.limit - cache.pinned : 0;
    }

    // Places [begin, end) of an event; request_at: the request at a place. Pinned entries stay anyway: a group adds
    // the frames of the rest. All requests of an event for one record are used at once, so no group ends within a
    // record. Marks entries that are too large to be admitted. A set that competes for room afterwards, or without a
    // limit, is one group.
    template <typename RequestAt>
    std::uint64_t group_end(const Cache& cache, std::uint64_t begin, std::uint64_t end,
                            RequestAt request_at) {
        const std::uint64_t room = room_of(cache);
        if (unit_sizes_ && end - begin <= room) return end;
        const bool whole = room_ == Room::AFTER || unlimited_;
        std::uint64_t filled = 0;
        for (std::uint64_t place = begin; place < end;) {
            const std::uint32_t record = record_of(requests_.entries[request_at(place)]);
            std::uint64_t added = 0;
            std::uint64_t next = place;
            for (; next < end; ++next) {
                const EntryId entry = requests_.entries[request_at(next)];
                if (record_of(entry) != record || (room_ == Room::AFTER && next > place)) break;
                flags_[entry] &= static_cast<std::uint8_t>(~BYPASS);
                if (busy_[entry] == 0) added += size_of(entry);
            }
            if (added > room) {
                added = admitted(cache, added, [&](auto visit) {
                    for (std::uint64_t each = place; each < next; ++each)
                        visit(requests_.entries[request_at(each)]);
                });
            }
            if (!whole && filled + added > room) return place;
            filled += added;
            place = next;
        }
        return end;
    }

    // For entries of one record that need `added` frames at once, which are too many: residents stay, what fits beside
    // them is admitted in order, the rest is not. Returns the frames of those that are kept.
    template <typename Each>
    std::uint64_t admitted(const Cache& cache, std::uint64_t added, Each each) {
        std::uint64_t frames = 0;
        each([&](EntryId entry) {
            if (busy_[entry] == 0 && (flags_[entry] & RESIDENT) != 0) frames += size_of(entry);
        });
        each([&](EntryId entry) {
            if ((flags_[entry] & RESIDENT) != 0) return;
            if (frames + size_of(entry) > room_of(cache)) {
                bypass(cache, entry, added);
            } else {
                frames += size_of(entry);
            }
        });
        return frames;
    }

    // For the entry's next request. `needed`: the frames needed at once, which are too many.
    void bypass(const Cache& cache, EntryId entry, std::uint64_t needed) {
        if (!bypasses_ || (flags_[entry] & STAYS) != 0) refuse_capacity(cache, needed);
        flags_[entry] |= BYPASS;
    }

    template <typename RequestAt>
    void run_group(Cache& cache, std::uint64_t begin, std::uint64_t end, RequestAt request_at) {
        const auto each = [&](auto visit) {
            for (std::uint64_t place = begin; place < end; ++place)
                visit(requests_.entries[request_at(place)]);
        };
        std::uint64_t missing = 0;
        for (std::uint64_t place = begin; place < end; ++place) {
            const std::uint64_t at = request_at(place);
            prefetch(at);
            const EntryId entry = requests_.entries[at];
            const std::uint8_t flags = flags_[entry];
            if ((flags & IN_SET) != 0) refuse_twice(entry);
            if ((flags & (RESIDENT | BYPASS)) == 0) {
                missing += size_of(entry);
                cache.policy->miss(entry);
            }
            flags_[entry] = flags | IN_SET;
        }
        if (room_ == Room::BEFORE && cache.used + missing > cache.limit) {
            // All are busy before anything is evicted: none of the group's entries evicts another.
            each([this](EntryId entry) { ++busy_[entry]; });
            make_room(cache, missing);
            each([this](EntryId entry) { --busy_[entry]; });
        }
        for (std::uint64_t place = begin; place < end; ++place) request(cache, request_at(place));
        if (room_ == Room::AFTER) {
            make_room(cache, 0);
            each([this](EntryId entry) { flags_[entry] &= static_cast<std::uint8_t>(~FRESH); });
        }
    }

    void request(Cache& cache, std::uint64_t at) {
        const EntryId entry = requests_.entries[at];
        std::uint8_t flags = flags_[entry] & static_cast<std::uint8_t>(~(IN_SET | BYPASS));
        const bool hit = (flags & RESIDENT) != 0;
        const bool admitted = (flags_[entry] & BYPASS) == 0;
        if (hit) {
            ++counts_.hits;
            cache.policy->hit(entry);
        } else {
            ++counts_.misses;
            counts_.missed_frames += size_of(entry);
            counts_.missed_bytes += bytes_of(entry);
            if (admitted) {
                cache.used += size_of(entry);
                flags |= room_ == Room::AFTER ? RESIDENT | FRESH : RESIDENT;
                if ((flags & STAYS) != 0) keep(cache, entry);
                cache.policy->insert(entry);
            } else {
                ++counts_.not_admitted;
                cache.policy->bypass(entry);
            }
        }
        if (!requests_.writes.empty() && requests_.writes[at] != 0) {
            if (admitted) {
                flags |= DIRTY;
            } else {
                count_write_back(entry);
            }
        }
        flags_[entry] = flags;
        if (!result_.layer_hits.empty()) {
            const std::uint32_t layer = requests_.layers.empty() ? layer_of_[entry] : layer_;
            ++(hit ? result_.layer_hits : result_.layer_misses)[layer];
        }
        cache.policy->tick(Clock::REQUEST);
    }

    void keep(Cache& cache, EntryId entry) {
        busy_[entry] = 1;
        cache.pinned += size_of(entry);
        if (cache.pinned > cache.limit) refuse_capacity(cache, 0);
    }

    void make_room(Cache& cache, std::uint64_t frames) {
        if (unlimited_ || cache.used + frames <= cache.limit) return;
        victims_.clear();
        const Candidates candidates{frames_.data(), busy_.data()};
        counts_.starved += cache.policy->select(candidates, cache.used + frames - cache.limit, victims_);
        for (const EntryId victim : victims_) evict(cache, victim);
        if (cache.used + frames > cache.limit) throw std::logic_error("the policy named too few victims");
    }

    void evict(Cache& cache, EntryId entry) {
        const std::uint8_t flags = flags_[entry];
        cache.policy->remove(entry);
        flags_[entry] = flags & (STAYS | IN_SET);
        cache.used -= size_of(entry);
        counts_.evictions += (flags & FRESH) == 0 ? 1 : 0;
        if ((flags & DIRTY) != 0) count_write_back(entry);
    }

    void announce(std::uint64_t begin, std::uint64_t end) {
        const Phase phase =
            requests_.phases.empty() ? Phase::FORWARD : static_cast<Phase>(requests_.phases[event_]);
        AccessInfo info{phase, layer_, requests_.entries.subspan(begin, end - begin), {}};
        if (!requests_.requesters.empty()) info.requesters = requests_.requesters.subspan(begin, end - begin);
        for (Cache& cache : caches_) cache.policy->access(info);
    }

    void close_step() {
        for (Cache& cache : caches_) cache.policy->tick(Clock::STEP);
        count_step();
    }

    // A policy that knows the future begins with the best content that any cache of this size could hold by now.
    void end_warmup() {
        if (unlimited_) {
            unlimited_ = false;
            for (Cache& cache : caches_) make_room(cache, 0);
        }
        count_from_here();
    }

    // The requests are known: prefetch what a later one will touch.
    void prefetch(std::uint64_t at) {
        if (at + kAhead >= requests_.entries.size()) return;
        const EntryId entry = requests_.entries[at + kAhead];
        __builtin_prefetch(&flags_[entry], 1);
        if constexpr (requires(const P& policy) { policy.prefetch(entry); }) {
            // Only in the cache that will get the request: another one has no place for the entry.
            cache_for(options_.scope == Scope::LAYER ? layer_of_[entry] : 0).policy->prefetch(entry);
        }
    }

    [[noreturn]] void refuse_capacity(const Cache& cache, std::uint64_t added) const {
        const std::uint64_t headroom = cache.policy->headroom_frames();
        throw CapacityError(added + cache.pinned + headroom, cache.limit + headroom);
    }

    std::vector<Cache> caches_;
    Room room_;
    bool bypasses_;           // whether too large entries bypass instead of being refused
    bool unlimited_ = false;  // until the warm-up ends
    bool follows_accesses_ = false;
    std::vector<EntryId> victims_;  // scratch
};

}  // namespace tierstore
