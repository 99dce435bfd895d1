// Matrices of weights in 8 or 4 bits, block by block along their rows.
//
// A row of K values is stored as ceil(K / 64) blocks of 64 codes; codes beyond the row's end are 0. With m the largest
// magnitude of a block's values, and least and most the smallest and largest of them, all arithmetic in fp32, each
// operation rounded separately, r rounding half to even:
//
//   Int8  scale = m / 127; code = r(w / scale), from -127 to 127; its value is code * scale. One byte per code.
//   Int4  scale = (most - least) / 15; code = r((w - least) / scale), from 0 to 15; its value is code * scale + least.
//         Two codes per byte: byte i of 16 holds value i of 32 in its low half and value 16 + i in its high half. A
//         block has two numbers: (scale, least).
//
// A scale below the smallest normal number is 0, and so are its codes. Reasons: with 8 bits, absmax has an error of
// 0.6% of the weights' spread. With 4 bits at 0.625 bytes a weight, (scale, least) per 64 has 7.8%, a signed scale per
// 32 8.5%, absmax / 7 per 32 9.9% (SmolLM2-135M's feed-forward weights, which are close to normal).
#pragma once

#include <cstddef>
#include <cstdint>

namespace tierstore {

enum class QuantFormat { Int8, Int4 };

inline constexpr std::size_t kQuantBlock = 64;

// Blocks of a row; bytes of codes, and fp32 numbers stored with them, of a matrix.
constexpr std::size_t quant_blocks(std::size_t columns) { return (columns + kQuantBlock - 1) / kQuantBlock; }
constexpr std::size_t quant_code_bytes(QuantFormat format, std::size_t rows, std::size_t columns) {
    return rows * quant_blocks(columns) * (format == QuantFormat::Int8 ? kQuantBlock : kQuantBlock / 2);
}
constexpr std::size_t quant_scale_floats(QuantFormat format, std::size_t rows, std::size_t columns) {
    return rows * quant_blocks(columns) * (format == QuantFormat::Int8 ? 1 : 2);
}

// src: rows x columns. False if a value, or the value of its code, is not finite; the output is then undefined.
[[nodiscard]] bool quantize(QuantFormat format, std::uint8_t* codes, float* scales, const float* src,
                            std::size_t rows, std::size_t columns);
void dequantize(QuantFormat format, float* dst, const std::uint8_t* codes, const float* scales,
                std::size_t rows, std::size_t columns);

}  // namespace tierstore
