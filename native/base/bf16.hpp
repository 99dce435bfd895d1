// bf16, and the split master weight: an fp32 as its bf16 rounding and a signed 16-bit remainder.
//
// hi rounds half away from zero: (bits + 0x8000) >> 16. lo is the signed difference of the bit patterns,
// bits - (hi << 16), which is in [-0x8000, 0x7fff] because ties round away: half-to-even would need +0x8000 too.
// Everything is modulo 2^32, so merging recovers each of the 2^32 patterns: zeros, subnormals, finite values
// whose hi rounds up to infinity, infinities, and NaNs with their payload.
//
// How a NaN appears in hi alone: NaNs with mantissas of 0x7f8000 and above carry over into the sign
// (0x7fffffff becomes -0, 0xffffffff +0), and those of at most 0x7fff become infinity. The NaNs that
// processors make (0x7fc00000, 0xffc00000) stay NaNs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tierstore {

inline constexpr std::uint16_t split_hi(std::uint32_t bits) {
    return static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
}

inline constexpr std::int16_t split_lo(std::uint32_t bits) {
    // bits - (hi << 16) modulo 2^16 is the low half itself; its sign says in which direction hi was rounded.
    return static_cast<std::int16_t>(static_cast<std::uint16_t>(bits));
}

inline constexpr std::uint32_t merge_bits(std::uint16_t hi, std::int16_t lo) {
    return (static_cast<std::uint32_t>(hi) << 16) + static_cast<std::uint32_t>(static_cast<std::int32_t>(lo));
}

inline constexpr float merge(std::uint16_t hi, std::int16_t lo) {
    return __builtin_bit_cast(float, merge_bits(hi, lo));
}

inline constexpr float widen(std::uint16_t bf16) {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(bf16) << 16);
}

// Whole arrays: fp32 to (hi, lo) and back. The arrays must not overlap.
void split(std::uint16_t* hi, std::int16_t* lo, const float* src, std::size_t n);
void merge(float* dst, const std::uint16_t* hi, const std::int16_t* lo, std::size_t n);

}  // namespace tierstore
