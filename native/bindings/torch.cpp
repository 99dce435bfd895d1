// Products by torch's kernels.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "native/bindings/bindings.hpp"
#include "native/torch/products.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using tierstore::TorchProduct;
using tierstore::TorchProducts;
using tierstore::TorchType;

template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Rows of a matrix, `first` of each product: checked, and as addresses.
template <class T>
void place(const Matrix<T>& matrix, const char* name, const std::vector<std::size_t>& first,
           const std::vector<std::size_t>& rows, void* TorchProduct::* field,
           std::vector<TorchProduct>& products) {
    if (first.size() != rows.size()) {
        throw std::invalid_argument(std::string(name) + ": expected a first row for each product");
    }
    for (std::size_t i = 0; i < rows.size(); ++i) {
        if (first[i] > matrix.shape(0) || rows[i] > matrix.shape(0) - first[i]) {
            throw std::invalid_argument(std::string(name) + ": expected rows below " +
                                        std::to_string(matrix.shape(0)));
        }
        products[i].*field = const_cast<std::remove_const_t<T>*>(matrix.data()) + first[i] * matrix.shape(1);
    }
}

template <class T, TorchType type>
void multiply(TorchProducts& self, const Matrix<T>& out, const std::vector<std::size_t>& out_first,
              const Matrix<const T>& x, const std::vector<std::size_t>& x_first,
              const std::vector<std::size_t>& rows, const std::vector<std::uintptr_t>& weights) {
    if (weights.size() != rows.size()) throw std::invalid_argument("weights: expected one for each product");
    std::vector<TorchProduct> products(rows.size());
    for (std::size_t i = 0; i < rows.size(); ++i) {
        products[i].w = reinterpret_cast<void*>(weights[i]);
        products[i].rows = static_cast<std::int64_t>(rows[i]);
    }
    place(out, "out_first, rows", out_first, rows, &TorchProduct::out, products);
    place(x, "x_first, rows", x_first, rows, &TorchProduct::x, products);
    const auto n = static_cast<std::int64_t>(out.shape(1)), k = static_cast<std::int64_t>(x.shape(1));
    const nb::gil_scoped_release release;
    self.multiply(type, n, k, products);
}

}  // namespace

void bind_torch(nb::module_& m) {
    nb::class_<TorchProducts>(m, "TorchProducts",
                              R"(Many products of small matrices in one call, with the bits of ``torch.mm``.

``library``: the path of libtorch_cpu, which this process has loaded. RuntimeError where it is not, or does not offer what
this needs.)")
        .def(nb::init<const std::string&>(), "library"_a)
        .def(
            "multiply", multiply<float, TorchType::FP32>, "out"_a.noconvert(), "out_first"_a,
            "x"_a.noconvert(), "x_first"_a, "rows"_a, "weights"_a,
            R"(``out[o:o + r] = x[f:f + r] W^T`` for each product: ``o``, ``f`` and ``r`` of ``out_first``, ``x_first`` and ``rows``.

x (.., K), out (.., N) in fp32, or bf16's bits as uint16. ``weights``: addresses of matrices W, (N, K) of the same type,
contiguous, which the caller keeps where they are. On the caller's torch threads. ValueError for rows outside.)")
        .def("multiply", multiply<std::uint16_t, TorchType::BF16>, "out"_a.noconvert(), "out_first"_a,
             "x"_a.noconvert(), "x_first"_a, "rows"_a, "weights"_a)
        .def(
            "run", &TorchProducts::run, "rows"_a, "n"_a, "k"_a, nb::call_guard<nb::gil_scoped_release>(),
            R"(Columns that a kernel of tierstore adds up at a time in a product in bf16, to have torch's bits.

0 where torch computes it: more rows than a few, another shape than whole tiles, or a processor without AVX512_BF16. For
the threads that the caller has now; torch is asked the first time.)");
}
