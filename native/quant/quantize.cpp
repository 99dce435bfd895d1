#include "native/quant/quantize.hpp"

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "native/base/float_mode.hpp"

namespace tierstore {
namespace {

constexpr std::size_t kHalf = 16;  // values whose codes share bytes with as many others

// Rounds half to even, for magnitudes below 2^22; the compiler may not simplify it.
float round_even(float x) {
    constexpr float magic = 0x1.8p23f;
    return (x + magic) - magic;
}

float normal_or_zero(float scale) { return scale < FLT_MIN ? 0.0f : scale; }

// `n` values, at most a block; false where one is not finite.
bool quantize_int8(std::uint8_t* codes, float* scales, const float* src, std::size_t n) {
    float most = 0.0f, probe = 0.0f;
    for (std::size_t i = 0; i < n; ++i) {
        most = std::max(most, std::fabs(src[i]));
        probe += src[i] * 0.0f;  // NaN from what is not finite
    }
    const float scale = normal_or_zero(most / 127.0f);
    if (probe != 0.0f || !std::isfinite(127.0f * scale)) return false;
    *scales = scale;
    if (scale == 0.0f) return true;
    for (std::size_t i = 0; i < n; ++i) {
        const float code = std::clamp(round_even(src[i] / scale), -127.0f, 127.0f);
        codes[i] = static_cast<std::uint8_t>(static_cast<std::int8_t>(code));
    }
    return true;
}

bool quantize_int4(std::uint8_t* codes, float* scales, const float* src, std::size_t n) {
    float least = src[0], most = src[0], probe = 0.0f;
    for (std::size_t i = 0; i < n; ++i) {
        least = std::min(least, src[i]);
        most = std::max(most, src[i]);
        probe += src[i] * 0.0f;
    }
    const float scale = normal_or_zero((most - least) / 15.0f);
    if (probe != 0.0f || !std::isfinite(15.0f * scale + least)) return false;
    scales[0] = scale;
    scales[1] = least;
    if (scale == 0.0f) return true;
    for (std::size_t i = 0; i < n; ++i) {
        const float code = std::clamp(round_even((src[i] - least) / scale), 0.0f, 15.0f);
        const std::size_t byte = i / (2 * kHalf) * kHalf + i % kHalf;
        codes[byte] |= static_cast<std::uint8_t>(static_cast<unsigned>(code) << (i / kHalf % 2 == 0 ? 0 : 4));
    }
    return true;
}

void dequantize_int8(float* dst, const std::uint8_t* codes, const float* scales, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) {
        dst[i] = static_cast<float>(static_cast<std::int8_t>(codes[i])) * scales[0];
    }
}

void dequantize_int4(float* dst, const std::uint8_t* codes, const float* scales, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) {
        const std::uint8_t both = codes[i / (2 * kHalf) * kHalf + i % kHalf];
        dst[i] = static_cast<float>(i / kHalf % 2 == 0 ? both & 15 : both >> 4) * scales[0] + scales[1];
    }
}

}  // namespace

bool quantize(QuantFormat format, std::uint8_t* codes, float* scales, const float* src, std::size_t rows,
              std::size_t columns) {
    const FloatMode mode(FloatMode::Subnormals::Keep);
    const std::size_t code_bytes = quant_code_bytes(format, 1, kQuantBlock);
    const std::size_t floats = quant_scale_floats(format, 1, kQuantBlock);
    const auto one = format == QuantFormat::Int8 ? quantize_int8 : quantize_int4;
    std::fill_n(codes, quant_code_bytes(format, rows, columns), std::uint8_t{0});
    for (std::size_t row = 0; row < rows; ++row) {
        for (std::size_t k = 0; k < columns; k += kQuantBlock) {
            if (!one(codes, scales, src + row * columns + k, std::min(columns - k, kQuantBlock)))
                return false;
            codes += code_bytes;
            scales += floats;
        }
    }
    return true;
}

void dequantize(QuantFormat format, float* dst, const std::uint8_t* codes, const float* scales,
                std::size_t rows, std::size_t columns) {
    const FloatMode mode(FloatMode::Subnormals::Keep);
    const std::size_t code_bytes = quant_code_bytes(format, 1, kQuantBlock);
    const std::size_t floats = quant_scale_floats(format, 1, kQuantBlock);
    const auto one = format == QuantFormat::Int8 ? dequantize_int8 : dequantize_int4;
    for (std::size_t row = 0; row < rows; ++row) {
        for (std::size_t k = 0; k < columns; k += kQuantBlock) {
            one(dst + row * columns + k, codes, scales, std::min(columns - k, kQuantBlock));
            codes += code_bytes;
            scales += floats;
        }
    }
}

}  // namespace tierstore
