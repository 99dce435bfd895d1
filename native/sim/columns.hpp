// Checks of request columns, and data derived from them once.
#pragma once

#include <vector>

#include "native/sim/simulate.hpp"

namespace tierstore {

// Throws std::invalid_argument that names the column. Returns the number of entries.
std::uint32_t check_columns(const RequestColumns& requests);

// By entry; kNoLayer if it is never requested. Empty if no column has layers.
inline constexpr std::uint32_t kNoLayer = ~0u;
std::vector<std::uint32_t> layers_of_entries(const RequestColumns& requests, std::uint32_t entry_count);

// With layer scope: every entry's layer must have a quota, and events that are atomic or have a layer must stay in one.
void check_layers(const RequestColumns& requests, const std::vector<std::uint32_t>& layer_of,
                  const SimulationOptions& options);

}  // namespace tierstore
