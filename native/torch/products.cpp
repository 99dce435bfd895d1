#include "native/torch/products.hpp"

#include <dlfcn.h>

#include <stdexcept>
#include <vector>

#include "native/base/error.hpp"
#include "native/torch/sum_order.hpp"

namespace tierstore {

namespace {

template <class Function>
Function find(void* library, const char* name) {
    void* found = dlsym(library, name);
    if (found == nullptr) throw std::runtime_error(std::string("torch has no ") + name);
    return reinterpret_cast<Function>(found);
}

}  // namespace

class TorchProducts::View {
public:
    View(const TorchProducts& torch, TorchType type, void* data, std::int64_t rows, std::int64_t columns,
         bool transposed = false)
        : torch_(torch) {
        const std::int64_t sizes[2] = {transposed ? columns : rows, transposed ? rows : columns};
        const std::int64_t strides[2] = {transposed ? 1 : columns, transposed ? columns : 1};
        const std::int32_t dtype = torch.types_[static_cast<int>(type)];
        if (torch.from_blob_(data, 2, sizes, strides, 0, dtype, torch.cpu_, 0, &handle_) != 0) {
            throw std::runtime_error("torch made no tensor over given memory");
        }
    }
    ~View() { torch_.free_(handle_); }
    View(const View&) = delete;
    View& operator=(const View&) = delete;

    Handle handle() const { return handle_; }

private:
    const TorchProducts& torch_;
    Handle handle_ = nullptr;
};

TorchProducts::TorchProducts(const std::string& library) {
    // It stays loaded: Python never unloads a module, and this handle is not closed.
    void* loaded = dlopen(library.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (loaded == nullptr) throw std::runtime_error(library + " is not loaded");
    from_blob_ = find<decltype(from_blob_)>(loaded, "aoti_torch_create_tensor_from_blob");
    free_ = find<decltype(free_)>(loaded, "aoti_torch_delete_tensor_object");
    mm_out_ = find<decltype(mm_out_)>(loaded, "aoti_torch_cpu_mm_out");
    types_[static_cast<int>(TorchType::FP32)] =
        find<std::int32_t (*)()>(loaded, "aoti_torch_dtype_float32")();
    types_[static_cast<int>(TorchType::BF16)] =
        find<std::int32_t (*)()>(loaded, "aoti_torch_dtype_bfloat16")();
    cpu_ = find<std::int32_t (*)()>(loaded, "aoti_torch_device_type_cpu")();
    max_threads_ = reinterpret_cast<int (*)()>(dlsym(loaded, "omp_get_max_threads"));
    if (max_threads_ != nullptr && few_rows_offered()) {
        parallel_ = reinterpret_cast<Parallel>(dlsym(loaded, "GOMP_parallel"));
    }
}

void TorchProducts::multiply(TorchType type, std::int64_t n, std::int64_t k,
                             std::span<const TorchProduct> products) {
    std::vector<FewRowsProduct> few;
    for (const TorchProduct& product : products) {
        const std::size_t columns = type == TorchType::BF16 ? run(product.rows, n, k) : 0;
        if (columns == 0) {
            by_torch(type, n, k, product);
        } else {
            few.push_back({.out = static_cast<std::uint16_t*>(product.out),
                           .x = static_cast<const std::uint16_t*>(product.x),
                           .w = static_cast<const std::uint16_t*>(product.w),
                           .rows = static_cast<std::size_t>(product.rows),
                           .run = columns});
        }
    }
    if (few.empty()) return;
    multiply_few_rows(few, static_cast<std::size_t>(n), static_cast<std::size_t>(k), parallel_,
                      static_cast<unsigned>(max_threads_()));
}

std::size_t TorchProducts::run(std::int64_t rows, std::int64_t n, std::int64_t k) {
    if (parallel_ == nullptr || rows < 1 || rows > static_cast<std::int64_t>(few_rows_most) || n < 1 ||
        n % few_rows_block != 0 || k < 1 || k % few_rows_columns != 0) {
        return 0;
    }
    // Held during the trial, which other threads would only repeat.
    const std::lock_guard lock(mutex_);
    const auto [at, is_new] = runs_.try_emplace({max_threads_(), rows, n, k}, 0);
    if (is_new) {
        const auto torch = [&](std::uint16_t* out, std::uint16_t* x, std::uint16_t* w) {
            by_torch(TorchType::BF16, n, k, {.out = out, .x = x, .w = w, .rows = rows});
        };
        try {
            at->second = find_run(static_cast<std::size_t>(rows), static_cast<std::size_t>(n),
                                  static_cast<std::size_t>(k), torch);
        } catch (const SyscallError&) {
            // No memory for the trial: torch computes such products.
        }
    }
    return at->second;
}

void TorchProducts::by_torch(TorchType type, std::int64_t n, std::int64_t k,
                             const TorchProduct& product) const {
    const View x(*this, type, product.x, product.rows, k);
    const View w(*this, type, product.w, n, k, true);
    const View out(*this, type, product.out, product.rows, n);
    if (mm_out_(out.handle(), x.handle(), w.handle()) != 0) {
        throw std::runtime_error("torch did not multiply");
    }
}

}  // namespace tierstore
