#include "native/sim/simulate.hpp"

#include <algorithm>

#include "native/cache/policies/arc.hpp"
#include "native/cache/policies/clock.hpp"
#include "native/cache/policies/fifo.hpp"
#include "native/cache/policies/learned_use.hpp"
#include "native/cache/policies/lfu.hpp"
#include "native/cache/policies/lfu_decay.hpp"
#include "native/cache/policies/lirs.hpp"
#include "native/cache/policies/lru.hpp"
#include "native/cache/policies/next_use.hpp"
#include "native/cache/policies/s3_fifo.hpp"
#include "native/cache/policies/sieve.hpp"
#include "native/cache/policies/slru.hpp"
#include "native/cache/policies/two_q.hpp"
#include "native/cache/policies/w_tinylfu.hpp"
#include "native/sim/belady.hpp"
#include "native/sim/columns.hpp"
#include "native/sim/simulation.hpp"

namespace tierstore {
namespace {

constexpr std::string_view kBelady = "belady";
constexpr std::string_view kBeladyBypass = "belady-bypass";
constexpr std::string_view kUnbounded = "unbounded";

// Frames of each cache: one for all, or one a layer.
std::vector<std::uint64_t> capacities(const SimulationOptions& options) {
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

// Sizes of one frame each are what no sizes mean, and then none is looked up. The number of entries must still
// follow from another column.
RequestColumns without_ones(const RequestColumns& requests) {
    RequestColumns plain = requests;
    const bool known =
        requests.layer_of.size() == requests.sizes.size() || requests.bytes.size() == requests.sizes.size();
    const auto is_one = [](std::uint32_t frames) { return frames == 1; };
    if (known && std::all_of(plain.sizes.begin(), plain.sizes.end(), is_one)) plain.sizes = {};
    return plain;
}

class Run {
public:
    Run(const RequestColumns& requests, const SimulationOptions& options)
        : requests_(requests),
          options_(options),
          entry_count_(check_columns(requests)),
          layer_of_(layers_of_entries(requests, entry_count_)),
          capacities_(capacities(options)) {
        if (options.scope == Scope::LAYER) check_layers(requests, layer_of_, options);
    }

    SimulationResult policy() {
        std::vector<std::unique_ptr<Policy>> policies;
        for (std::size_t i = 0; i < capacities_.size(); ++i) {
            policies.push_back(options_.make(options_.policy, options_.policy_options));
        }
        return direct<Fifo, ClockPolicy, Lru, Lfu, LfuDecay, Slru, TwoQ, Arc, Lirs, S3Fifo, Sieve, WTinyLfu,
                      NextUse, LearnedUse>(std::move(policies));
    }

    SimulationResult belady(Room room) {
        if (options_.scope == Scope::GLOBAL) {
            std::vector<std::unique_ptr<Belady>> one;
            one.push_back(std::make_unique<Belady>(requests_.entries, entry_count_));
            return run(std::move(one), room);
        }
        std::vector<std::vector<EntryId>> asked(capacities_.size());
        for (const EntryId entry : requests_.entries) asked[layer_of_[entry]].push_back(entry);
        std::vector<std::unique_ptr<Belady>> policies;
        for (const auto& entries : asked) policies.push_back(std::make_unique<Belady>(entries, entry_count_));
        return run(std::move(policies), room);
    }

    SimulationResult unbounded() {
        capacities_.assign(capacities_.size(), std::numeric_limits<std::uint64_t>::max());
        std::vector<std::unique_ptr<Fifo>> policies;
        for (std::size_t i = 0; i < capacities_.size(); ++i) policies.push_back(std::make_unique<Fifo>());
        return run(std::move(policies), Room::BEFORE);
    }

private:
    // The loop for the class that the policies are of, if it is one of these: its calls are then direct.
    template <typename P, typename... Rest>
    SimulationResult direct(std::vector<std::unique_ptr<Policy>> policies) {
        if (dynamic_cast<P*>(policies.front().get()) == nullptr) {
            if constexpr (sizeof...(Rest) > 0) return direct<Rest...>(std::move(policies));
            return run(std::move(policies), Room::BEFORE);
        }
        std::vector<std::unique_ptr<P>> known;
        for (auto& policy : policies) known.emplace_back(static_cast<P*>(policy.release()));
        return run(std::move(known), Room::BEFORE);
    }

    template <typename P>
    SimulationResult run(std::vector<std::unique_ptr<P>> policies, Room room) {
        std::vector<SimulatedCache<P>> caches(policies.size());
        for (std::size_t i = 0; i < caches.size(); ++i) {
            const std::uint64_t headroom = policies[i]->headroom_frames();
            caches[i].limit = capacities_[i] > headroom ? capacities_[i] - headroom : 0;
            caches[i].policy = std::move(policies[i]);
        }
        return Simulation<P>(requests_, options_, entry_count_, layer_of_, std::move(caches), room).run();
    }

    const RequestColumns& requests_;
    const SimulationOptions& options_;
    std::uint32_t entry_count_;
    std::vector<std::uint32_t> layer_of_;
    std::vector<std::uint64_t> capacities_;
};

}  // namespace

std::vector<std::string> bound_names() {
    return {std::string(kBelady), std::string(kBeladyBypass), std::string(kUnbounded)};
}

SimulationResult simulate(const RequestColumns& requests, const SimulationOptions& options) {
    const RequestColumns plain = without_ones(requests);
    Run run(plain, options);
    const std::string& name = options.policy;
    if (name != kBelady && name != kBeladyBypass && name != kUnbounded) return run.policy();
    OptionReader(name, options.policy_options).finish();
    if (name == kUnbounded) return run.unbounded();
    return run.belady(name == kBelady ? Room::BEFORE : Room::AFTER);
}

}  // namespace tierstore
