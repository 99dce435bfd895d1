// A set of numbers below some size, as bits: an eighth of a byte each, whatever the order of additions and removals.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tierstore {

// Bits, and above them levels in which a bit says that the 64 bits below it are not all zero: the first number, the
// last, and the next after one are found in as many steps as there are levels (four up to 16 million).
class NumberSet {
public:
    std::size_t size() const { return size_; }

    bool contains(std::uint32_t number) const {
        const std::size_t word = number / kBits;
        return !levels_.empty() && word < levels_[0].size() &&
               (levels_[0][word] >> (number % kBits) & 1) != 0;
    }

    // Adds the number; returns whether it was new.
    bool add(std::uint32_t number) {
        if (contains(number)) return false;
        grow(number);
        std::size_t at = number;
        for (std::vector<std::uint64_t>& level : levels_) {
            std::uint64_t& word = level[at / kBits];
            const bool there = word != 0;
            word |= std::uint64_t{1} << (at % kBits);
            if (there) break;
            at /= kBits;
        }
        ++size_;
        return true;
    }

    // Removes the number; returns whether it was present.
    bool discard(std::uint32_t number) {
        if (!contains(number)) return false;
        std::size_t at = number;
        for (std::vector<std::uint64_t>& level : levels_) {
            std::uint64_t& word = level[at / kBits];
            word &= ~(std::uint64_t{1} << (at % kBits));
            if (word != 0) break;
            at /= kBits;
        }
        --size_;
        return true;
    }

    void clear() {
        levels_.clear();
        size_ = 0;
    }

    // The smallest number. The set must not be empty.
    std::uint32_t first() const {
        std::size_t at = 0;
        for (std::size_t level = levels_.size(); level-- > 0;) {
            at = at * kBits + static_cast<std::size_t>(std::countr_zero(levels_[level][at]));
        }
        return static_cast<std::uint32_t>(at);
    }

    // The `count` smallest, ascending, or all.
    std::vector<std::uint32_t> smallest(std::size_t count) const {
        std::vector<std::uint32_t> found;
        found.reserve(count < size_ ? count : size_);
        for (std::size_t word = 0; found.size() < count && found.size() < size_; ++word) {
            for (std::uint64_t bits = levels_[0][word]; bits != 0 && found.size() < count; bits &= bits - 1) {
                found.push_back(static_cast<std::uint32_t>(word * kBits) +
                                static_cast<std::uint32_t>(std::countr_zero(bits)));
            }
        }
        return found;
    }

    // The `count` largest, ascending, or all.
    std::vector<std::uint32_t> largest(std::size_t count) const {
        std::vector<std::uint32_t> found;
        if (count >= size_) return smallest(size_);
        for (std::size_t word = levels_.empty() ? 0 : levels_[0].size();
             word-- > 0 && found.size() < count;) {
            for (std::uint64_t bits = levels_[0][word]; bits != 0 && found.size() < count;) {
                const int bit = 63 - std::countl_zero(bits);
                found.push_back(static_cast<std::uint32_t>(word * kBits) + static_cast<std::uint32_t>(bit));
                bits &= ~(std::uint64_t{1} << bit);
            }
        }
        return {found.rbegin(), found.rend()};
    }

private:
    static constexpr std::size_t kBits = 64;

    void grow(std::uint32_t number) {
        std::size_t words = number / kBits + 1;
        if (levels_.empty()) levels_.emplace_back();
        for (std::size_t level = 0;; ++level) {
            if (level == levels_.size()) {
                levels_.emplace_back();
                // The level below existed before this one: derive its bits.
                const std::vector<std::uint64_t>& below = levels_[level - 1];
                levels_[level].resize((below.size() + kBits - 1) / kBits);
                for (std::size_t i = 0; i < below.size(); ++i) {
                    if (below[i] != 0) levels_[level][i / kBits] |= std::uint64_t{1} << (i % kBits);
                }
            }
            if (levels_[level].size() < words) levels_[level].resize(words);
            if (levels_[level].size() == 1) return;
            words = (levels_[level].size() + kBits - 1) / kBits;
        }
    }

    std::vector<std::vector<std::uint64_t>> levels_;
    std::size_t size_ = 0;
};

}  // namespace tierstore
