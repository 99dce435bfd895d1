// Products by torch's kernels.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "native/bindings/bindings.hpp"
#include "native/torch/choices.hpp"
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

TorchType type_of(bool bf16) { return bf16 ? TorchType::BF16 : TorchType::FP32; }

const void* at(std::uintptr_t address) { return reinterpret_cast<const void*>(address); }

void count_chosen(TorchProducts& self, bool bf16, std::int64_t rows, std::int64_t k, std::uintptr_t now,
                  std::uintptr_t added, std::uintptr_t w, std::int64_t top_k,
                  nb::ndarray<std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> counts) {
    if (rows < 0 || k < 1 || top_k < 0) {
        throw std::invalid_argument("rows, k, top_k: expected at least 0, 1 and 0");
    }
    const tierstore::Streams streams{type_of(bf16), rows, k, at(now), at(added)};
    const std::span<std::int64_t> into(counts.data(), counts.shape(0));
    const nb::gil_scoped_release release;
    tierstore::count_chosen(self, streams, at(w), top_k, into);
}

void fade_towards(bool bf16, std::size_t count, float decay, std::uintptr_t mean, std::uintptr_t now,
                  std::uintptr_t before) {
    tierstore::fade_towards(type_of(bf16), count, decay, reinterpret_cast<void*>(mean), at(now), at(before));
}

}  // namespace

void bind_torch(nb::module_& m) {
    nb::class_<TorchProducts>(m, "TorchProducts",
                              R"(Many products of small matrices in one call, with the bits of ``torch.mm``.

``library``: the path of libtorch_cpu, which this process has loaded. RuntimeError where it is not, or does not offer what
this needs.)")
        .def(
            "__init__",
            [](TorchProducts* self, const nb::object& library) {
                new (self) TorchProducts(path_of(library));
            },
            "library"_a, nb::sig("def __init__(self, library: str) -> None"))
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
the threads that the caller has now; a trial determines them at the first call.)")
        .def(
            "count_chosen", count_chosen, "bf16"_a, "rows"_a, "k"_a, "now"_a, "added"_a, "weight"_a,
            "top_k"_a, "counts"_a.noconvert(),
            R"(Adds to ``counts`` (N,) how often each row of ``weight`` has one of the ``top_k`` largest products.

With each row of ``now + added``; of equal ones the first counts. ``now``, ``added`` (0: nothing) and ``weight``: addresses of
contiguous matrices (rows, k), (rows, k) and (N, k), in bf16 or fp32, which the caller keeps where they are.)");
    m.def("fade_towards", fade_towards, "bf16"_a, "count"_a, "decay"_a, "mean"_a, "now"_a, "before"_a,
          R"(``mean = decay mean + (1 - decay) (now - before)``, each of ``count`` numbers in bf16 or fp32.

``mean``, ``now``, ``before``: their addresses; the caller keeps them where they are.)");
}
