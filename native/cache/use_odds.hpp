// How often entries with the same past are used in the next cycle.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

namespace tierstore {

// Counts of trials and uses by two facts about an entry: the cycles since its last use (0, 1, 2, 3, 4-7, 8-15, 16-31,
// more) and its average use in sixteenths. The counts of one cycle weigh half after 64 later ones.
class UseOdds {
public:
    // Called before the counts of one layer's cycle, of `layers`.
    void fade(std::uint32_t layers) {
        const double factor = std::exp2(-1.0 / (kHalfLife * layers));
        for (Cell& cell : cells_) {
            cell.trials *= factor;
            cell.uses *= factor;
        }
    }

    // The index of the counts for entries with this past.
    static std::uint32_t past(std::uint32_t age, double use) {
        const auto bits = static_cast<std::uint32_t>(std::bit_width(age));
        const std::uint32_t row = std::min(age < 4 ? age : bits + 1, kAges - 1);
        const auto column = std::min(static_cast<std::uint32_t>(use * kUses), kUses - 1);
        return row * kUses + column;
    }

    void count(std::uint32_t past, bool used) {
        Cell& cell = cells_[past];
        cell.trials += 1.0;
        if (used) cell.uses += 1.0;
    }

    // While little has been counted, `use` itself weighs as much as a few trials.
    double chance(std::uint32_t past, double use) const {
        const Cell& cell = cells_[past];
        return (cell.uses + kPrior * use) / (cell.trials + kPrior);
    }

private:
    static constexpr std::uint32_t kAges = 8;
    static constexpr std::uint32_t kUses = 16;
    static constexpr double kHalfLife = 64.0;
    static constexpr double kPrior = 4.0;

    struct Cell {
        double trials = 0.0;
        double uses = 0.0;
    };

    std::array<Cell, kAges * kUses> cells_{};
};

}  // namespace tierstore
