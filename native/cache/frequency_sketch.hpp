// How often keys were requested recently, with half a byte per counter.
#pragma once

#include <cstdint>
#include <vector>

namespace tierstore {

// A count-min sketch of 4 rows of 4-bit counters with conservative update and aging: Einziger, Friedman and
// Manes, "TinyLFU: a highly efficient cache admission policy", 2017. An estimate is never below the count (up to 15)
// since the last halvings.
class FrequencySketch {
public:
    // Allocates counters for about `keys` keys; all counts are halved once `sample` has been counted.
    void reset(std::uint64_t keys, std::uint64_t sample);
    // One request, which counts `weight` towards the sample.
    void count(std::uint32_t key, std::uint32_t weight);
    std::uint32_t estimate(std::uint32_t key) const;
    void prefetch(std::uint32_t key) const {
        for (std::uint32_t row = 0; row < kRows; ++row) __builtin_prefetch(&table_[slot(key, row) / 16], 1);
    }

private:
    static constexpr std::uint32_t kRows = 4;
    static constexpr std::uint32_t kMost = 15;

    // The finalizer of SplitMix64 (Steele, Lea and Flood, 2014), a different stream for each row.
    static std::uint64_t mix(std::uint64_t value) {
        value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9ull;
        value = (value ^ value >> 27) * 0x94d049bb133111ebull;
        return value ^ value >> 31;
    }
    std::uint64_t slot(std::uint32_t key, std::uint32_t row) const {
        return row * (mask_ + 1) + (mix(key + (row + 1) * 0x9e3779b97f4a7c15ull) & mask_);
    }
    std::uint32_t at(std::uint64_t slot) const {
        return static_cast<std::uint32_t>(table_[slot / 16] >> (slot % 16 * 4) & kMost);
    }

    std::vector<std::uint64_t> table_;  // 16 counters per word
    std::uint64_t mask_ = 0;            // counters per row, minus one
    std::uint64_t sample_ = 0;
    std::uint64_t counted_ = 0;
};

}  // namespace tierstore
