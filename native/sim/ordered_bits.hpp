#pragma once

#include <bit>
#include <cstdint>
#include <vector>

namespace tierstore {

// A set of numbers below a bound, ordered: one bit each, and above each 64 words one word that says which of them are
// not empty. Finding a neighbour looks at a handful of words.
class OrderedBits {
public:
    using Number = std::uint32_t;
    static constexpr Number kNone = ~0u;

    explicit OrderedBits(std::uint64_t bound) {
        do {
            bound = (bound + 63) / 64;
            levels_.emplace_back(bound, 0);
        } while (bound > 1);
    }

    void insert(Number number) {
        for (auto& words : levels_) {
            std::uint64_t& word = words[number / 64];
            const bool was_empty = word == 0;
            word |= std::uint64_t{1} << number % 64;
            if (!was_empty) return;
            number /= 64;
        }
    }

    void erase(Number number) {
        for (auto& words : levels_) {
            std::uint64_t& word = words[number / 64];
            word &= ~(std::uint64_t{1} << number % 64);
            if (word != 0) return;
            number /= 64;
        }
    }

    Number last() const {
        const std::uint64_t top = levels_.back().empty() ? 0 : levels_.back()[0];
        return top == 0 ? kNone : descend(levels_.size() - 1, 63 - std::countl_zero(top));
    }

    // The largest below `number`.
    Number before(Number number) const {
        for (std::size_t level = 0; level < levels_.size(); ++level) {
            const std::uint64_t below = levels_[level][number / 64] & ((std::uint64_t{1} << number % 64) - 1);
            if (below != 0) return descend(level, number / 64 * 64 + 63 - std::countl_zero(below));
            number /= 64;
        }
        return kNone;
    }

private:
    Number descend(std::size_t level, Number number) const {
        while (level-- > 0) number = number * 64 + 63 - std::countl_zero(levels_[level][number]);
        return number;
    }

    std::vector<std::vector<std::uint64_t>> levels_;  // the numbers first, then their summaries
};

}  // namespace tierstore
