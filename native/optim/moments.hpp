// The formats of AdamW's two moments: fp32, bf16, or 8 bits in blocks. A step computes in fp32, updates the weight
// with the fp32 moments, and only then rounds them for the next step.
//
// Rounding is stochastic: of the two neighbours of a value, the one above with the probability that makes the mean
// equal to the value. Its random numbers are a hash of (record, step, element, moment), not a stream, so that any
// split of a record, any instruction set and any replay rounds alike:
//
//     key = splitmix64(record_hash + step * 0x9e3779b97f4a7c15)     64 bits: key0 the low half, key1 the high
//     h = element ^ key0;  h ^= h >> 16;  h *= 0x7feb352d;  h += key1;  h ^= h >> 15;  h *= 0x846ca68b
//     h ^= h >> 16                                                  32 bits, one hash for both moments
//
// (Steele, Lea and Flood's splitmix64; the multipliers and shifts of Wellons's lowbias32; `element` is the
// index in the record modulo 2^32.)
//
// Bf16: the upper half of the fp32 plus 16 random bits: those of h's low half for exp_avg, of its high half for
// exp_avg_sq. The mean over all 65,536 is exactly the value. From the largest finite bf16 on (0x7f7f), values are
// truncated: nothing finite becomes infinite; infinities and NaNs stay.
//
// Int8: blocks of kMomentBlock elements, counted from the record's first, each with a scale s. A code is an exponent
// field f and 3 bits of mantissa m, after a sign bit in exp_avg's:
//
//     exp_avg, sign ffff mmm:   f = 0: s * m * 2^-17,   else s * (1 + m / 8) * 2^(f - 15)
//     exp_avg_sq,  fffff mmm:   f = 0: s * m * 2^-32,   else s * (1 + m / 8) * 2^(f - 30)     f < 31
//
// The largest value is 1.875 * s in both, and exp_avg_sq reaches down as far as the square of exp_avg, and a bit
// further: where both are near their end, the update is not larger than it would be. The scale is the power of two
// with which the block's largest magnitude is in (0.9375, 1.875] * s; at least 2^-94, so that no code is a subnormal,
// and at most 2^110, beyond which values saturate; 0 for a block of zeros; NaN for a block with a NaN or an infinity,
// which is then NaN as a whole. Rounding uses 20 random bits: h's upper ones for exp_avg, its lower ones for
// exp_avg_sq. The mean over all of them is exactly the value (for f = 0: within 2^-20 of the distance of two codes). A
// non-zero exp_avg_sq keeps at least code 1: rounded to zero, it would let the next step divide by eps.
//
// This is the dynamic quantisation of Dettmers et al. 2022 (8-bit Optimizers via Block-wise Quantization) in base 2
// with an exponent field of fixed width, where theirs is base 10 and unary, and with a power of two as scale, where
// theirs is the absolute maximum: pure arithmetic on the fp32's bits, no search, every decoded value exact, and an
// unchanged value does not move when its block's largest does. Theirs is finer near a block's largest value, this one
// everywhere below; docs/DESIGN.md has both errors.
//
// Subnormals count as zero, also those of bf16, in and out; no rounding makes one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tierstore {

enum class MomentFormat { Fp32, Bf16, Int8 };
enum class Moment { ExpAvg, ExpAvgSq };

inline constexpr std::size_t kMomentBlock = 256;

inline constexpr std::size_t moment_blocks(std::size_t numel) {
    return (numel + kMomentBlock - 1) / kMomentBlock;
}

// fp32 to the narrow formats, rounded to nearest (ties away from zero), for import and conversion; blocks count from
// the first element. The arrays must not overlap.
void encode_bf16(std::uint16_t* dst, const float* src, std::size_t n);
void encode_int8(Moment moment, std::uint8_t* codes, float* scales, const float* src, std::size_t n);

// The inverse, exact. (Bf16: widen_bf16.)
void decode_int8(Moment moment, float* dst, const std::uint8_t* codes, const float* scales, std::size_t n);

}  // namespace tierstore
