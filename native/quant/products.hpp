// Products with quantised matrices: y = x W^T, on a few threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "native/base/cpu.hpp"
#include "native/base/worker_pool.hpp"
#include "native/quant/quantize.hpp"

namespace tierstore {

// rows x columns, as written by quantize(); codes and scales need no alignment beyond that of the element.
struct QuantMatrix {
    QuantFormat format;
    const std::uint8_t* codes;
    const float* scales;
    std::size_t rows, columns;
};

// M consecutive rows, of fp32 or of the bits of bf16: one of the two pointers is set.
struct ConstRows {
    const float* fp32;
    const std::uint16_t* bf16;
};
struct Rows {
    float* fp32;
    std::uint16_t* bf16;
};

// Threads that share products by rows of W. Bits depend neither on their number, nor the instruction set, nor the
// other rows of x: an output is the fp32 sum of fp32 products, in an order set by W's columns
// (native/quant/kernels.inl), rounded to nearest even if stored as bf16.
//
// Any thread may call multiply(), several at once; it computes too, and returns when all is done. Not after close().
class QuantProducts {
public:
    // `threads`: computing threads, including the caller; at least 1.
    explicit QuantProducts(std::size_t threads);

    // y[m, n] = sum over k of x[m, k] * w[n, k]; with the best instruction set, unless `isa` names another. Throws
    // std::invalid_argument for one that this machine lacks.
    void multiply(const Rows& y, const ConstRows& x, std::size_t m, const QuantMatrix& w,
                  std::optional<InstructionSet> isa = std::nullopt);

    std::size_t threads() const { return threads_; }

    // Joins the threads. Later calls do nothing.
    void close() { pool_.close(); }

private:
    std::size_t threads_;
    WorkerPool pool_;
};

}  // namespace tierstore
