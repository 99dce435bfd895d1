// Products of a few rows with bf16 matrices, which are read once at the speed of memory, with the bits of torch.
//
// torch multiplies bf16 on a CPU through oneDNN, which reorders the matrix for each product: for a few rows that takes
// several times as long as reading it. Here 16 rows of the matrix are transposed in registers instead. The instruction
// is the same (two products added to a sum in fp32), so the bits are too, if the sums are taken in the same order: one
// run of columns after another, each from zero, and then summed. sum_order.hpp finds the runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tierstore {

// out (rows, n) = x (rows, k) w^T with w (n, k); all row-major and contiguous, as bits of bf16.
struct FewRowsProduct {
    std::uint16_t* out;
    const std::uint16_t* x;
    const std::uint16_t* w;
    std::size_t rows;
    std::size_t run;  // columns, a multiple of few_rows_columns
};

// With more rows than this, reordering the matrix is faster.
inline constexpr std::size_t few_rows_most = 32;
// n and k must be multiples of these.
inline constexpr std::size_t few_rows_block = 16, few_rows_columns = 32;

// libgomp's GOMP_parallel: runs body(data) on `threads` threads, including the caller's; returns when all have finished.
using Parallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

// Whether this processor, and TIERSTORE_ISA, support these products.
bool few_rows_offered();

// Computes `products`, of at most few_rows_most rows each, on `threads` threads that take parts in turns.
void multiply_few_rows(std::span<const FewRowsProduct> products, std::size_t n, std::size_t k,
                       Parallel parallel, unsigned threads);

namespace few_rows_kernel {

// Rows [begin, end) of w, whole blocks. `next`: memory of one block that is read after them, or null.
void avx512_bf16(const FewRowsProduct& product, std::size_t n, std::size_t k, std::size_t begin,
                 std::size_t end, const std::uint16_t* next);

}  // namespace few_rows_kernel

}  // namespace tierstore
