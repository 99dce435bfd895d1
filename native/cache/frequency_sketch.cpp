#include "native/cache/frequency_sketch.hpp"

#include <algorithm>
#include <bit>

namespace tierstore {
namespace {

constexpr std::uint64_t kMostCounters = 1ull << 28;
constexpr std::uint64_t kLowHalves = 0x7777777777777777ull;

}  // namespace

void FrequencySketch::reset(std::uint64_t keys, std::uint64_t sample) {
    const std::uint64_t counters = std::bit_ceil(std::clamp<std::uint64_t>(keys, 16, kMostCounters));
    table_.assign(counters * kRows / 16, 0);
    mask_ = counters - 1;
    sample_ = sample;
    counted_ = 0;
}

std::uint32_t FrequencySketch::estimate(std::uint32_t key) const {
    std::uint32_t least = kMost;
    for (std::uint32_t row = 0; row < kRows; ++row) least = std::min(least, at(slot(key, row)));
    return least;
}

void FrequencySketch::count(std::uint32_t key, std::uint32_t weight) {
    std::uint64_t slots[kRows];
    std::uint32_t least = kMost;
    for (std::uint32_t row = 0; row < kRows; ++row) {
        slots[row] = slot(key, row);
        least = std::min(least, at(slots[row]));
    }
    for (const std::uint64_t slot : slots) {
        // No branch: whether a row has the least is a coin toss.
        const std::uint64_t add = (least < kMost) & (at(slot) == least);
        table_[slot / 16] += add << (slot % 16 * 4);
    }
    counted_ += weight;
    if (counted_ < sample_) return;
    counted_ /= 2;
    for (std::uint64_t& word : table_) word = word >> 1 & kLowHalves;
}

}  // namespace tierstore
