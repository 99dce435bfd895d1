// The order in which torch's bf16 kernel sums the products of a row and a column.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace tierstore {

// Computes out (rows, n) = x (rows, k) w^T with w (n, k), all contiguous, as bits of bf16.
using MultiplyBf16 = std::function<void(std::uint16_t* out, std::uint16_t* x, std::uint16_t* w)>;

// The run of columns (few_rows.hpp) with which multiply_few_rows() has the bits of `torch`; 0 if none is found. n and
// k must be multiples of the block sizes in few_rows.hpp.
//
// It tests with rows whose products cancel exactly, in randomly drawn places: only rounding errors are left, and they
// distinguish the orders. Only a few rows of the matrix are in memory, whatever n is.
std::size_t find_run(std::size_t rows, std::size_t n, std::size_t k, const MultiplyBf16& torch);

}  // namespace tierstore
