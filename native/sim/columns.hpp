// Checks of request columns, and what is derived from them once.
#pragma once

#include <vector>

#include "native/sim/simulate.hpp"

namespace tierstore {

// Throws std::invalid_argument, naming the column. Returns how many entries there are.
std::uint32_t check_columns(const RequestColumns& requests);

// By entry; kNoLayer for an entry that no one asks for. Empty when no column tells of layers.
inline constexpr std::uint32_t kNoLayer = ~0u;
std::vector<std::uint32_t> layers_of_entries(const RequestColumns& requests, std::uint32_t entry_count);

// With layer scope: every entry's layer has a quota, and events that are atomic or have a layer keep to one.
void check_layers(const RequestColumns& requests, const std::vector<std::uint32_t>& layer_of,
                  const SimulationOptions& options);

}  // namespace tierstore
