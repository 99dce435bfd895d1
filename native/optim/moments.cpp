#include "native/optim/moments.hpp"

#include <algorithm>

#include "native/optim/kernels.hpp"

namespace tierstore {
namespace {

using namespace kernels;

static_assert(block_numel == kMomentBlock);
constexpr std::uint32_t sign_bit = 0x80000000u;
constexpr std::uint32_t smallest_normal = 0x00800000u;

std::uint32_t bits(float x) { return __builtin_bit_cast(std::uint32_t, x); }
float value(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

// With subnormals as zeros, whatever the caller's floating-point mode.
std::uint32_t magnitude(float x) {
    const std::uint32_t m = bits(x) & ~sign_bit;
    return m < smallest_normal ? 0 : m;
}

float to_lowest_of(Moment moment) {
    return moment == Moment::ExpAvg ? exp_avg_to_lowest : exp_avg_sq_to_lowest;
}

}  // namespace

void encode_bf16(std::uint16_t* dst, const float* src, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) {
        const std::uint32_t m = magnitude(src[i]);
        std::uint32_t rounded = m < largest_bf16_bits ? m + 0x8000u : m;
        if (m > infinity_bits) rounded |= 0x00400000u;  // a NaN whose payload is all in the lower half
        dst[i] = static_cast<std::uint16_t>(((bits(src[i]) & sign_bit) | rounded) >> 16);
    }
}

void encode_int8(Moment moment, std::uint8_t* codes, float* scales, const float* src, std::size_t n) {
    const float to_lowest = to_lowest_of(moment);
    for (std::size_t start = 0; start < n; start += kMomentBlock, ++scales) {
        const std::size_t end = std::min(start + kMomentBlock, n);
        std::uint32_t top = 0;
        for (std::size_t i = start; i < end; ++i) top = std::max(top, magnitude(src[i]));
        if (top == 0 || top >= infinity_bits) {
            *scales = top == 0 ? 0.0f : value(0x7fc00000u);
            std::fill(codes + start, codes + end, std::uint8_t{0});
            continue;
        }
        const std::uint32_t exponent = std::clamp((top + random_mask) >> 23, least_scale, most_scale);
        *scales = value(exponent << 23);
        const std::uint32_t largest = moment == Moment::ExpAvg ? 127 : 247;
        for (std::size_t i = start; i < end; ++i) {
            const std::uint32_t m = magnitude(src[i]);
            // In double, where no quotient is a subnormal; what fp32 would flush is code 0 here too.
            const auto x = static_cast<float>(static_cast<double>(value(m)) / *scales * to_lowest);
            std::uint32_t code = std::max(bits(x + value(lowest_bits)), bits(x) + exponent_one) - lowest_bits;
            code = std::min((code + (1u << (code_shift - 1))) >> code_shift, largest);
            if (moment == Moment::ExpAvg) {
                code |= (bits(src[i]) & sign_bit) >> 24;
            } else if (m != 0) {
                code = std::max(code, 1u);
            }
            codes[i] = static_cast<std::uint8_t>(code);
        }
    }
}

void decode_int8(Moment moment, float* dst, const std::uint8_t* codes, const float* scales, std::size_t n) {
    const float to_lowest = to_lowest_of(moment);
    for (std::size_t i = 0; i < n; ++i) {
        const std::uint32_t sign = moment == Moment::ExpAvg ? codes[i] & 0x80u : 0u;
        const std::uint32_t code = (codes[i] ^ sign) << code_shift;
        const float x = std::min(value(code + lowest_bits) - value(lowest_bits),
                                 value(code + lowest_bits - exponent_one));
        const std::uint32_t decoded = bits(x * (scales[i / kMomentBlock] / to_lowest));
        dst[i] = value(decoded | sign << 24);
    }
}

}  // namespace tierstore
