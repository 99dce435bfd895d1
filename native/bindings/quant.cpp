// Quantised weights and their products.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/variant.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <variant>

#include "native/bindings/bindings.hpp"
#include "native/quant/products.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using tierstore::InstructionSet;
using tierstore::QuantFormat;
using tierstore::QuantMatrix;
using tierstore::QuantProducts;

template <class T>
using Flat = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Codes = Flat<const std::uint8_t>;
using Scales = Flat<const float>;

void check_sizes(QuantFormat format, std::size_t rows, std::size_t columns, std::size_t codes,
                 std::size_t scales) {
    const std::size_t bytes = tierstore::quant_code_bytes(format, rows, columns);
    const std::size_t floats = tierstore::quant_scale_floats(format, rows, columns);
    if (codes != bytes || scales != floats) {
        throw std::invalid_argument("codes, scales: expected " + std::to_string(bytes) + " bytes and " +
                                    std::to_string(floats) + " numbers, got " + std::to_string(codes) +
                                    " and " + std::to_string(scales));
    }
}

template <class T>
tierstore::ConstRows input(const Matrix<const T>& x) {
    if constexpr (sizeof(T) == 4) {
        return {x.data(), nullptr};
    } else {
        return {nullptr, x.data()};
    }
}

template <class T>
tierstore::Rows output(const Matrix<T>& y) {
    if constexpr (sizeof(T) == 4) {
        return {y.data(), nullptr};
    } else {
        return {nullptr, y.data()};
    }
}

template <class T>
void multiply(QuantProducts& self, QuantFormat format, const Matrix<T>& y, const Matrix<const T>& x,
              const Codes& codes, const Scales& scales, std::optional<InstructionSet> isa) {
    const std::size_t m = x.shape(0), rows = y.shape(1), columns = x.shape(1);
    if (y.shape(0) != m) throw std::invalid_argument("y, x: expected as many rows in both");
    check_sizes(format, rows, columns, codes.size(), scales.size());
    const QuantMatrix w{format, codes.data(), scales.data(), rows, columns};
    const auto out = output<T>(y);
    const auto in = input<T>(x);
    const nb::gil_scoped_release release;
    self.multiply(out, in, m, w, isa);
}

}  // namespace

void bind_quant(nb::module_& m) {
    nb::enum_<QuantFormat>(m, "QuantFormat", "How weights are quantised.")
        .value("INT8", QuantFormat::Int8)
        .value("INT4", QuantFormat::Int4);
    m.attr("QUANT_BLOCK") = tierstore::kQuantBlock;
    m.def(
        "quantize",
        [](QuantFormat format, const Flat<std::uint8_t>& codes, const Flat<float>& scales,
           const Matrix<const float>& src) {
            check_sizes(format, src.shape(0), src.shape(1), codes.size(), scales.size());
            const nb::gil_scoped_release release;
            return tierstore::quantize(format, codes.data(), scales.data(), src.data(), src.shape(0),
                                       src.shape(1));
        },
        "format"_a, "codes"_a.noconvert(), "scales"_a.noconvert(), "src"_a.noconvert(),
        R"(Quantises a matrix, row by row in blocks of ``QUANT_BLOCK``; see docs/FORMAT.md.

False where a value, or what its code would stand for, is not finite: codes and scales are then undefined.)");
    m.def(
        "dequantize",
        [](QuantFormat format, const Matrix<float>& dst, const Codes& codes, const Scales& scales) {
            check_sizes(format, dst.shape(0), dst.shape(1), codes.size(), scales.size());
            const nb::gil_scoped_release release;
            tierstore::dequantize(format, dst.data(), codes.data(), scales.data(), dst.shape(0),
                                  dst.shape(1));
        },
        "format"_a, "dst"_a.noconvert(), "codes"_a.noconvert(), "scales"_a.noconvert(),
        "What the codes stand for, in fp32.");

    nb::class_<QuantProducts>(m, "QuantProducts", R"(Threads that compute products with quantised matrices.

The bits of a row of the result depend on its row of ``x`` and on the matrix alone: not on the threads, the
instruction set or the other rows. Several threads may multiply at once; none after ``close``.)")
        .def(
            "__init__",
            [](QuantProducts* self, std::size_t threads) {
                if (threads < 1) throw std::invalid_argument("threads: expected at least 1, got 0");
                new (self) QuantProducts(threads);
            },
            "threads"_a)
        .def_prop_ro("threads", &QuantProducts::threads, "Threads that compute, the caller's included.")
        .def("multiply", multiply<float>, "format"_a, "y"_a.noconvert(), "x"_a.noconvert(),
             "codes"_a.noconvert(), "scales"_a.noconvert(), "isa"_a = nb::none(),
             R"(``y = x W^T``: x (M, K), y (M, N), W of N rows and K columns; in fp32.

uint16 arrays are bf16's bits: sums stay in fp32, and are rounded to nearest even.)")
        .def("multiply", multiply<std::uint16_t>, "format"_a, "y"_a.noconvert(), "x"_a.noconvert(),
             "codes"_a.noconvert(), "scales"_a.noconvert(), "isa"_a = nb::none())
        .def("close", &QuantProducts::close, nb::call_guard<nb::gil_scoped_release>(), "Joins the threads.");
}
