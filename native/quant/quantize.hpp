// Matrices of weights in 8 or 4 bits, block by block along their rows.
//
// A row of K values is kept as ceil(K / 64) blocks of 64 codes; codes beyond the row's end are 0. With m the largest
// magnitude of a block's values, and least and most the smallest and largest of them, all arithmetic in fp32, each
// operation rounded by itself, r rounding half to even:
//
//   Int8  scale = m / 127; code = r(w / scale), from -127 to 127; stands for code * scale. A byte a code.
//   Int4  scale = (most - least) / 15; code = r((w - least) / scale), from 0 to 15; stands for code * scale + least.
//         Two codes a byte: byte i of 16 holds value i of 32 in its low half and value 16 + i in its high half. A block
//         has two numbers: (scale, least).
//
// A scale below the smallest normal number is 0, and so are its codes. Why so: with 8 bits, absmax errs by 0.6% of the
// weights' spread. With 4 bits at 0.625 bytes a weight, (scale, least) of 64 errs by 7.8%, a signed scale of 32 by
// 8.5%, absmax / 7 of 32 by 9.9% (SmolLM2-135M's feed-forward weights, which are close to normal).
#pragma once

#include <cstddef>
#include <cstdint>

namespace tierstore {

enum class QuantFormat { Int8, Int4 };

inline constexpr std::size_t kQuantBlock = 64;

// Blocks of a row; bytes of codes, and fp32 numbers beside them, of a matrix.
constexpr std::size_t quant_blocks(std::size_t columns) { return (columns + kQuantBlock - 1) / kQuantBlock; }
constexpr std::size_t quant_code_bytes(QuantFormat format, std::size_t rows, std::size_t columns) {
    return rows * quant_blocks(columns) * (format == QuantFormat::Int8 ? kQuantBlock : kQuantBlock / 2);
}
constexpr std::size_t quant_scale_floats(QuantFormat format, std::size_t rows, std::size_t columns) {
    return rows * quant_blocks(columns) * (format == QuantFormat::Int8 ? 1 : 2);
}

// src: rows x columns. False where a value, or what its code would stand for, is not finite; the output is then undefined.
[[nodiscard]] bool quantize(QuantFormat format, std::uint8_t* codes, float* scales, const float* src,
                            std::size_t rows, std::size_t columns);
void dequantize(QuantFormat format, float* dst, const std::uint8_t* codes, const float* scales,
                std::size_t rows, std::size_t columns);

}  // namespace tierstore
