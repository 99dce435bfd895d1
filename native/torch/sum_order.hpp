// In which order torch's kernel for bf16 adds up the products of a row and a column.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace tierstore {

// Computes out (rows, n) = x (rows, k) w^T with w (n, k), all contiguous, in bf16's bits.
using MultiplyBf16 = std::function<void(std::uint16_t* out, std::uint16_t* x, std::uint16_t* w)>;

// The run of columns (few_rows.hpp) with which multiply_few_rows() has the bits of `torch`; 0 where none is found. n and
// k must be multiples of what few_rows.hpp says.
//
// It asks with rows whose products cancel each other exactly, in places drawn at random: what is left are the errors of
// rounding alone, and they tell one order from another. Of the matrix a few rows are in memory, whatever n is.
std::size_t find_run(std::size_t rows, std::size_t n, std::size_t k, const MultiplyBf16& torch);

}  // namespace tierstore
