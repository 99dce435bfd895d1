#include "native/sim/columns.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace tierstore {
namespace {

// Positions in the logs of policies, several for an entry, have 32 bits.
constexpr std::size_t kMostEntries = std::size_t{1} << 29;

// Columns are long and checked before each replay: loops without an exit, which vectorise.
template <typename T>
T most(std::span<const T> column) {
    T found = 0;
    for (const T value : column) found = std::max(found, value);
    return found;
}

template <typename T>
bool descends(std::span<const T> column) {
    bool found = false;
    for (std::size_t i = 1; i < column.size(); ++i) found |= column[i] < column[i - 1];
    return found;
}

void expect_length(const char* column, std::size_t got, std::size_t expected, const char* unit) {
    if (got == 0 || got == expected) return;
    throw std::invalid_argument(std::string("column '") + column + "': expected " + std::to_string(expected) +
                                " values, one for each " + unit + ", got " + std::to_string(got));
}

void check_offsets(const RequestColumns& requests) {
    const auto& offsets = requests.offsets;
    if (offsets.empty() || offsets.front() != 0 || offsets.back() != requests.entries.size()) {
        throw std::invalid_argument("column 'offsets': expected one value more than events, from 0 to the " +
                                    std::to_string(requests.entries.size()) + " entries");
    }
    if (descends(offsets)) {
        const auto descent = std::is_sorted_until(offsets.begin(), offsets.end());
        throw std::invalid_argument("column 'offsets': event " +
                                    std::to_string(descent - offsets.begin() - 1) + " ends before it begins");
    }
}

std::uint32_t count_entries(const RequestColumns& requests) {
    const EntryId largest = most(requests.entries);
    const std::size_t asked = requests.entries.empty() ? 0 : std::size_t{largest} + 1;
    const std::size_t given =
        std::max({requests.sizes.size(), requests.layer_of.size(), requests.records.size(),
                  requests.groups.size(), requests.bytes.size(), requests.pinned.size()});
    if (given != 0 && asked > given) {
        throw std::invalid_argument("column 'entries': entry " + std::to_string(largest) +
                                    ", and there are " + std::to_string(given));
    }
    const std::size_t entries = std::max(asked, given);
    if (entries > kMostEntries) {
        throw std::invalid_argument("column 'entries': " + std::to_string(entries) +
                                    " entries, numbered from 0 on; " + std::to_string(kMostEntries) +
                                    " are the most that there can be");
    }
    expect_length("sizes", requests.sizes.size(), entries, "entry");
    expect_length("entry_layers", requests.layer_of.size(), entries, "entry");
    expect_length("records", requests.records.size(), entries, "entry");
    expect_length("groups", requests.groups.size(), entries, "entry");
    expect_length("bytes", requests.bytes.size(), entries, "entry");
    expect_length("pinned", requests.pinned.size(), entries, "entry");
    return static_cast<std::uint32_t>(entries);
}

void check_layer(std::uint32_t layer) {
    if (layer <= 0xffff) return;
    throw std::invalid_argument("layer " + std::to_string(layer) + ": layers are numbered up to 65535");
}

}  // namespace

std::uint32_t check_columns(const RequestColumns& requests) {
    check_offsets(requests);
    const std::size_t events = requests.events();
    expect_length("writes", requests.writes.size(), requests.entries.size(), "entry asked for");
    expect_length("requesters", requests.requesters.size(), requests.entries.size(), "entry asked for");
    expect_length("layers", requests.layers.size(), events, "event");
    expect_length("phases", requests.phases.size(), events, "event");
    expect_length("steps", requests.steps.size(), events, "event");
    if (descends(requests.steps)) {
        throw std::invalid_argument("column 'steps': expected steps that never decrease");
    }
    const std::uint8_t phase = most(requests.phases);
    if (phase > static_cast<std::uint8_t>(Phase::EXPORT)) {
        throw std::invalid_argument("column 'phases': no phase " + std::to_string(phase));
    }
    check_layer(std::max(most(requests.layers), most(requests.layer_of)));
    const std::uint32_t entries = count_entries(requests);
    if (std::find(requests.sizes.begin(), requests.sizes.end(), 0u) != requests.sizes.end()) {
        throw std::invalid_argument("column 'sizes': expected at least 1 frame for each entry");
    }
    return entries;
}

std::vector<std::uint32_t> layers_of_entries(const RequestColumns& requests, std::uint32_t entry_count) {
    if (!requests.layer_of.empty()) return {requests.layer_of.begin(), requests.layer_of.end()};
    if (requests.layers.empty()) return {};
    std::vector<std::uint32_t> layer_of(entry_count, kNoLayer);
    for (std::size_t event = 0; event < requests.events(); ++event) {
        for (std::uint64_t i = requests.offsets[event]; i < requests.offsets[event + 1]; ++i) {
            std::uint32_t& layer = layer_of[requests.entries[i]];
            if (layer == kNoLayer) layer = requests.layers[event];
        }
    }
    return layer_of;
}

void check_layers(const RequestColumns& requests, const std::vector<std::uint32_t>& layer_of,
                  const SimulationOptions& options) {
    if (layer_of.empty() && !requests.entries.empty()) {
        throw std::invalid_argument("layer scope needs the column 'layers' or 'entry_layers'");
    }
    for (std::size_t entry = 0; entry < layer_of.size(); ++entry) {
        if (layer_of[entry] == kNoLayer || layer_of[entry] < options.layer_quotas.size()) continue;
        throw std::invalid_argument("entry " + std::to_string(entry) + " is of layer " +
                                    std::to_string(layer_of[entry]) + ", and there are quotas for " +
                                    std::to_string(options.layer_quotas.size()));
    }
    if (requests.layers.empty() && options.contract == Contract::SEQUENTIAL) return;
    for (std::size_t event = 0; event < requests.events(); ++event) {
        const std::uint64_t begin = requests.offsets[event];
        for (std::uint64_t i = begin; i < requests.offsets[event + 1]; ++i) {
            const EntryId entry = requests.entries[i];
            const std::uint32_t expected =
                requests.layers.empty() ? layer_of[requests.entries[begin]] : requests.layers[event];
            if (layer_of[entry] == expected) continue;
            throw std::invalid_argument("event " + std::to_string(event) + ": entry " +
                                        std::to_string(entry) + " is not of layer " +
                                        std::to_string(expected) + ", and the scope is the layer");
        }
    }
}

}  // namespace tierstore
