// Many products of small matrices in one call, computed by torch's own CPU kernel: the bits are those of torch.mm.
//
// torch exports a C interface for compiled models (torch/csrc/inductor/aoti_torch/c/shim.h), which it keeps
// compatible. Its functions are looked up in the library that this process has loaded, so nothing here is built
// against torch.
//
// Products of a few rows in bf16 are computed by few_rows.hpp if its bits were found to be torch's: torch is asked the
// first time that a shape comes (sum_order.hpp).
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <tuple>

#include "native/torch/few_rows.hpp"

namespace tierstore {

enum class TorchType : std::uint8_t { FP32, BF16 };

// out (rows, n) = x (rows, k) w^T with w (n, k); all row-major and contiguous.
struct TorchProduct {
    void* out;
    void* x;
    void* w;
    std::int64_t rows;
};

class TorchProducts {
public:
    // `library`: the path of libtorch_cpu. Throws std::runtime_error if it is not loaded, or lacks a function.
    explicit TorchProducts(const std::string& library);

    // Computes `products` on torch's threads. Throws std::runtime_error if torch refuses one.
    void multiply(TorchType type, std::int64_t n, std::int64_t k, std::span<const TorchProduct> products);

    // The run of columns with which few_rows.hpp has torch's bits for such a product in bf16, with the caller's
    // present number of threads; 0: torch computes it.
    std::size_t run(std::int64_t rows, std::int64_t n, std::int64_t k);

private:
    // An at::Tensor, which the interface hides.
    using Handle = void*;
    using Error = std::int32_t;

    // A tensor over borrowed memory, until the end of its scope.
    class View;

    void by_torch(TorchType type, std::int64_t n, std::int64_t k, const TorchProduct& product) const;

    Error (*from_blob_)(void*, std::int64_t, const std::int64_t*, const std::int64_t*, std::int64_t,
                        std::int32_t, std::int32_t, std::int32_t, Handle*) = nullptr;
    Error (*free_)(Handle) = nullptr;
    Error (*mm_out_)(Handle, Handle, Handle) = nullptr;
    std::int32_t types_[2] = {};  // by TorchType
    std::int32_t cpu_ = 0;
    // torch's OpenMP; null if it uses another one.
    Parallel parallel_ = nullptr;
    int (*max_threads_)() = nullptr;

    std::mutex mutex_;  // guards runs_
    std::map<std::tuple<int, std::int64_t, std::int64_t, std::int64_t>, std::size_t>
        runs_;  // threads, rows, n, k
};

}  // namespace tierstore
