// The functions of each instruction set's translation unit. Internal to this directory.
//
// As in native/optim/kernels.hpp: no standard library but <cstddef> and <cstdint>, definitions in unnamed namespaces.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tierstore::quant_kernels {

// Sums are kept in this many lanes, on every instruction set: lane l sums the products of columns l, l + 16, ...
inline constexpr std::size_t lanes = 16;
// Values that share a scale: a whole number of lanes.
inline constexpr std::size_t block = 64;
// Rows of x, and columns of a row, that are processed at a time.
inline constexpr std::size_t most_rows = 64, panel = 512;

// Rows [begin, end) of a quantised matrix times rows of x: y[m, n] for m < rows.
struct Product {
    const float* x;  // rows x columns, zeros beyond the matrix's columns; 64-byte lines
    std::size_t rows;
    std::size_t columns;  // a multiple of `block`
    const std::uint8_t* codes;
    const float* scales;
    float* y;  // either y or y_bf16
    std::uint16_t* y_bf16;
    std::size_t y_stride;
    std::size_t begin, end;
};

struct Kernels {
    void (*int8)(const Product&);
    void (*int4)(const Product&);
};

extern const Kernels scalar;
extern const Kernels avx2;
extern const Kernels avx512;

}  // namespace tierstore::quant_kernels
