#include "native/sim/simulate.hpp"

#include "native/sim/columns.hpp"
#include "native/sim/simulation.hpp"

namespace tierstore {
namespace {

std::vector<std::uint64_t> limits_of(const SimulationOptions& options) {
    if ((options.scope == Scope::LAYER) == options.layer_quotas.empty()) {
        throw std::invalid_argument("layer quotas belong to layer scope, one for each layer");
    }
    if (options.scope == Scope::GLOBAL) return {options.capacity_frames};
    std::uint64_t total = 0;
    for (const std::uint64_t quota : options.layer_quotas) total += quota;
    if (total > options.capacity_frames) {
        throw std::invalid_argument("the layers' quotas are " + std::to_string(total) +
                                    " frames, the capacity " + std::to_string(options.capacity_frames));
    }
    return options.layer_quotas;
}

std::vector<SimulatedCache<Policy>> make_caches(const SimulationOptions& options) {
    std::vector<SimulatedCache<Policy>> caches;
    for (const std::uint64_t frames : limits_of(options)) {
        SimulatedCache<Policy>& cache = caches.emplace_back();
        cache.policy = make_policy(options.policy, options.policy_options);
        const std::uint64_t headroom = cache.policy->headroom_frames();
        cache.limit = frames > headroom ? frames - headroom : 0;
    }
    return caches;
}

}  // namespace

SimulationResult simulate(const RequestColumns& requests, const SimulationOptions& options) {
    const std::uint32_t entry_count = check_columns(requests);
    const std::vector<std::uint32_t> layer_of = layers_of_entries(requests, entry_count);
    std::vector<SimulatedCache<Policy>> caches = make_caches(options);
    if (options.scope == Scope::LAYER) check_layers(requests, layer_of, options);
    return Simulation<Policy>(requests, options, entry_count, layer_of, std::move(caches), Room::BEFORE).run();
}

}  // namespace tierstore
