#include "native/sim/simulation.hpp"

#include <algorithm>
#include <string>

namespace tierstore {

SimulationState::SimulationState(const RequestColumns& requests, const SimulationOptions& options,
                                 std::uint32_t entry_count, std::span<const std::uint32_t> layer_of)
    : requests_(requests),
      options_(options),
      layer_of_(layer_of),
      unit_sizes_(requests.sizes.empty()),
      flags_(entry_count, 0),
      frames_(requests.sizes.begin(), requests.sizes.end()),
      busy_(entry_count, 0) {
    if (unit_sizes_) frames_.assign(entry_count, 1);
    for (std::size_t entry = 0; entry < requests.pinned.size(); ++entry) {
        if (requests.pinned[entry] != 0) flags_[entry] = STAYS;
    }
    std::uint32_t layers = 0;
    for (const std::uint32_t layer : layer_of) layers = std::max(layers, layer + 1);  // kNoLayer: 0
    for (const std::uint32_t layer : requests.layers) layers = std::max(layers, layer + 1);
    if (options.scope == Scope::LAYER) layers = static_cast<std::uint32_t>(options.layer_quotas.size());
    result_.layer_hits.assign(layers, 0);
    result_.layer_misses.assign(layers, 0);
    if (options.detail == Detail::EVENTS) {
        result_.event_missed_bytes.assign(requests.events(), 0);
        result_.event_written_bytes.assign(requests.events(), 0);
        result_.event_misses.assign(requests.events(), 0);
        result_.event_write_backs.assign(requests.events(), 0);
    }
}

void SimulationState::close_event() {
    result_.event_missed_bytes[event_] = counts_.missed_bytes - event_began_.missed_bytes;
    result_.event_written_bytes[event_] = counts_.written_bytes - event_began_.written_bytes;
    result_.event_misses[event_] = static_cast<std::uint32_t>(counts_.misses - event_began_.misses);
    result_.event_write_backs[event_] =
        static_cast<std::uint32_t>(counts_.write_backs - event_began_.write_backs);
    event_began_ = counts_;
}

void SimulationState::count_step() {
    const auto requests = [](const SimulationCounts& counts) { return counts.hits + counts.misses; };
    result_.step_requests.push_back(requests(counts_) - requests(step_began_));
    result_.step_misses.push_back(counts_.misses - step_began_.misses);
    result_.step_write_backs.push_back(counts_.write_backs - step_began_.write_backs);
    step_began_ = counts_;
}

void SimulationState::count_from_here() {
    counts_ = step_began_ = event_began_ = SimulationCounts{};
    for (auto* column : {&result_.event_misses, &result_.event_write_backs}) {
        std::fill(column->begin(), column->end(), 0);
    }
    for (auto* column : {&result_.event_missed_bytes, &result_.event_written_bytes}) {
        std::fill(column->begin(), column->end(), 0);
    }
    for (auto* column : {&result_.step_requests, &result_.step_misses, &result_.step_write_backs,
                         &result_.layer_hits, &result_.layer_misses}) {
        std::fill(column->begin(), column->end(), 0);
    }
}

void SimulationState::serve_residents_first() {
    rank_.resize(order_.size());
    for (std::size_t first = 0; first < order_.size();) {
        const std::uint32_t record = record_of(requests_.entries[order_[first]]);
        std::size_t last = first;
        std::size_t resident = 0;
        for (; last < order_.size() && record_of(requests_.entries[order_[last]]) == record; ++last) {
            resident += (flags_[requests_.entries[order_[last]]] & RESIDENT) != 0 ? 1 : 0;
        }
        const std::uint8_t rank = resident == last - first ? 0 : resident > 0 ? 1 : 2;
        std::fill(rank_.begin() + first, rank_.begin() + last, rank);
        first = last;
    }
    const std::uint64_t begin = order_.front();
    std::stable_sort(order_.begin(), order_.end(), [&](std::uint64_t left, std::uint64_t right) {
        return rank_[left - begin] < rank_[right - begin];
    });
}

void SimulationState::check_set(std::uint64_t begin, std::uint64_t end) {
    const auto set = requests_.entries.subspan(begin, end - begin);
    std::vector<EntryId> sorted(set.begin(), set.end());
    std::sort(sorted.begin(), sorted.end());
    const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
    if (twice != sorted.end()) refuse_twice(*twice);
}

void SimulationState::refuse_twice(EntryId entry) const {
    throw std::invalid_argument("event " + std::to_string(event_) + " asks for entry " +
                                std::to_string(entry) + " twice, and atomic events are sets");
}

}  // namespace tierstore
