// Every policy and bound over random columns, with everything that columns can say, on two threads over the
// same arrays. What is counted is checked against itself; the sanitizers look at the rest.
#include <algorithm>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "native/sim/simulate.hpp"
#include "native/sim/stack_distances.hpp"
#include "tests/native/check.hpp"

using namespace tierstore;

namespace {

constexpr std::uint32_t kLayers = 3;
constexpr std::uint32_t kEntries = 60;
constexpr std::size_t kEvents = 1500;
constexpr std::size_t kLargestSet = 9;

using Random = std::mt19937;

struct Columns {
    std::vector<std::uint64_t> offsets{0};
    std::vector<EntryId> entries;
    std::vector<std::uint8_t> writes, phases, pinned;
    std::vector<std::uint32_t> layers, steps, sizes, layer_of, records;

    explicit Columns(Random& random) {
        const auto pick = [&](std::uint32_t most) {
            return std::uniform_int_distribution<std::uint32_t>(0, most)(random);
        };
        for (EntryId entry = 0; entry < kEntries; ++entry) {
            sizes.push_back(1 + pick(3));
            layer_of.push_back(entry % kLayers);
            records.push_back(entry / (2 * kLayers) * kLayers + entry % kLayers);
            pinned.push_back(pick(14) == 0);
        }
        for (std::size_t event = 0; event < kEvents; ++event) {
            const std::uint32_t layer = pick(kLayers - 1);
            std::vector<EntryId> mine;
            for (EntryId entry = layer; entry < kEntries; entry += kLayers) mine.push_back(entry);
            std::shuffle(mine.begin(), mine.end(), random);
            mine.resize(pick(kLargestSet));
            entries.insert(entries.end(), mine.begin(), mine.end());
            offsets.push_back(entries.size());
            layers.push_back(layer);
            phases.push_back(static_cast<std::uint8_t>(1 + pick(1)));
            steps.push_back(static_cast<std::uint32_t>(event / 7));
        }
        for (std::size_t i = 0; i < entries.size(); ++i) writes.push_back(pick(2) == 0);
    }

    RequestColumns plain() const { return {.offsets = offsets, .entries = entries, .writes = writes}; }
    RequestColumns whole() const {
        return {.offsets = offsets,
                .entries = entries,
                .writes = writes,
                .layers = layers,
                .phases = phases,
                .steps = steps,
                .sizes = sizes,
                .layer_of = layer_of,
                .records = records,
                .pinned = pinned};
    }
};

std::uint64_t sum(const std::vector<std::uint64_t>& values) {
    return std::accumulate(values.begin(), values.end(), std::uint64_t{0});
}

void check_counts(const Columns& columns, const SimulationResult& result) {
    const SimulationCounts& counts = result.counts;
    CHECK(counts.hits + counts.misses == columns.entries.size());
    CHECK(counts.evictions <= counts.misses);
    CHECK(counts.write_backs <= counts.misses);
    CHECK(sum(result.step_requests) == columns.entries.size());
    CHECK(sum(result.step_misses) == counts.misses);
    CHECK(sum(result.layer_misses) == counts.misses);
    CHECK(sum(result.layer_hits) == counts.hits);
}

void run_all(const Columns& columns) {
    std::vector<std::string> names = policy_names();
    for (const std::string& bound : bound_names()) names.push_back(bound);
    for (const std::string& name : names) {
        for (const Contract contract : {Contract::ATOMIC, Contract::SEQUENTIAL}) {
            SimulationOptions options{.policy = name, .capacity_frames = 90, .contract = contract};
            check_counts(columns, simulate(columns.whole(), options));
            options.scope = Scope::LAYER;
            options.layer_quotas.assign(kLayers, 30);
            check_counts(columns, simulate(columns.whole(), options));
        }
    }
}

void run_stack(const Columns& columns) {
    for (const Contract contract : {Contract::ATOMIC, Contract::SEQUENTIAL}) {
        const StackDistances found = stack_distances(columns.plain(), contract, 100);
        for (std::uint64_t capacity = kLargestSet; capacity <= kEntries; capacity += 5) {
            SimulationOptions options{
                .policy = "lru", .capacity_frames = capacity, .contract = contract, .warmup_events = 100};
            const SimulationCounts counts = simulate(columns.plain(), options).counts;
            const auto deeper = found.depths.begin() + static_cast<std::ptrdiff_t>(capacity) + 1;
            const std::uint64_t misses = std::accumulate(deeper, found.depths.end(), found.cold);
            CHECK(counts.misses == misses);
            CHECK(counts.write_backs == found.write_backs[capacity]);
        }
    }
}

}  // namespace

int main() {
    for (unsigned seed = 0; seed < 3; ++seed) {
        Random random(seed);
        const Columns columns(random);
        std::thread other([&] { run_all(columns); });
        run_all(columns);
        run_stack(columns);
        other.join();
    }
    return 0;
}
