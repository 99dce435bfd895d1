// Alignment arithmetic. Alignments are powers of two.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tierstore {

inline constexpr size_t kPageBytes = 4096;
inline constexpr size_t kHugePageBytes = size_t{2} << 20;

constexpr uint64_t round_down(uint64_t value, uint64_t alignment) { return value & ~(alignment - 1); }

constexpr uint64_t round_up(uint64_t value, uint64_t alignment) {
    return round_down(value + alignment - 1, alignment);
}

constexpr bool is_aligned(uint64_t value, uint64_t alignment) { return (value & (alignment - 1)) == 0; }

constexpr bool is_power_of_two(uint64_t value) { return value != 0 && (value & (value - 1)) == 0; }

inline bool is_aligned(const void* address, uint64_t alignment) {
    return is_aligned(reinterpret_cast<uintptr_t>(address), alignment);
}

}  // namespace tierstore
