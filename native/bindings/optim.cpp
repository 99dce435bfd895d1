// AdamW, the gradient sums, the split weight, checksums and the instruction set: what tests, benchmarks and
// `doctor` need of them. Training reaches these kernels through the engine.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string_view.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "native/base/bf16.hpp"
#include "native/base/cpu.hpp"
#include "native/base/crc32c.hpp"
#include "native/bindings/bindings.hpp"
#include "native/optim/adamw.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using tierstore::InstructionSet;

template <class T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Steps = nb::ndarray<const float, nb::shape<-1, 7>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using SplitWeight = std::pair<Array<std::uint16_t>, Array<std::int16_t>>;

void same_length(std::size_t expected, std::size_t got, const char* name) {
    if (got == expected) return;
    throw std::invalid_argument(std::string(name) + ": expected " + std::to_string(expected) +
                                " elements, got " + std::to_string(got));
}

void adamw(tierstore::AdamWSpan span, const Array<float>& exp_avg, const Array<float>& exp_avg_sq,
           const std::optional<Array<const float>>& grad, const Steps& steps, float grad_scale,
           std::optional<InstructionSet> isa) {
    same_length(span.numel, exp_avg.size(), "exp_avg");
    same_length(span.numel, exp_avg_sq.size(), "exp_avg_sq");
    if (grad) same_length(span.numel, grad->size(), "grad");
    span.exp_avg = exp_avg.data();
    span.exp_avg_sq = exp_avg_sq.data();
    span.grad = grad ? grad->data() : nullptr;
    const auto* first = reinterpret_cast<const tierstore::AdamWStep*>(steps.data());
    const std::span<const tierstore::AdamWStep> rows(first, steps.shape(0));
    const InstructionSet chosen = isa ? *isa : tierstore::best_instruction_set();
    const nb::gil_scoped_release release;
    tierstore::adamw_with(chosen, span, rows, grad_scale);
}

}  // namespace

void bind_optim(nb::module_& m) {
    nb::enum_<InstructionSet>(m, "InstructionSet")
        .value("SCALAR", InstructionSet::Scalar)
        .value("AVX2", InstructionSet::Avx2)
        .value("AVX512", InstructionSet::Avx512);
    m.def("instruction_set", &tierstore::best_instruction_set,
          "The instruction set that the kernels use. ValueError when TIERSTORE_ISA cannot be had.");
    m.def("instruction_set_supported", &tierstore::supports, "isa"_a);

    m.def(
        "crc32c",
        [](const Bytes& data, std::uint32_t crc) {
            const nb::gil_scoped_release release;
            return tierstore::crc32c(data.data(), data.nbytes(), crc);
        },
        "data"_a.noconvert(), "crc"_a = 0,
        nb::sig("def crc32c(data: numpy.typing.NDArray[typing.Any], crc: int = 0) -> int"));
    m.def(
        "crc32c_scalar",
        [](const Bytes& data, std::uint32_t crc) {
            const nb::gil_scoped_release release;
            return tierstore::crc32c_scalar(data.data(), data.nbytes(), crc);
        },
        "data"_a.noconvert(), "crc"_a = 0,
        nb::sig("def crc32c_scalar(data: numpy.typing.NDArray[typing.Any], crc: int = 0) -> int"));
    m.def("crc32c_combine", &tierstore::crc32c_combine, "crc_a"_a, "crc_b"_a, "len_b"_a);
    m.def("crc32c_method", [] { return std::string_view(tierstore::crc32c_method()); });

    m.def(
        "adamw",
        [](const Array<float>& weight, const Array<float>& exp_avg, const Array<float>& exp_avg_sq,
           const std::optional<Array<const float>>& grad, const Steps& steps, float grad_scale,
           std::optional<InstructionSet> isa) {
            adamw({.weight = weight.data(),
                   .weight_hi = nullptr,
                   .weight_lo = nullptr,
                   .exp_avg = nullptr,
                   .exp_avg_sq = nullptr,
                   .grad = nullptr,
                   .numel = weight.size()},
                  exp_avg, exp_avg_sq, grad, steps, grad_scale, isa);
        },
        "weight"_a.noconvert(), "exp_avg"_a.noconvert(), "exp_avg_sq"_a.noconvert(),
        "grad"_a.noconvert().none(), "steps"_a.noconvert(), "grad_scale"_a = 1.0f, "isa"_a = nb::none());
    m.def(
        "adamw",
        [](const SplitWeight& weight, const Array<float>& exp_avg, const Array<float>& exp_avg_sq,
           const std::optional<Array<const float>>& grad, const Steps& steps, float grad_scale,
           std::optional<InstructionSet> isa) {
            same_length(weight.first.size(), weight.second.size(), "weight_lo");
            adamw({.weight = nullptr,
                   .weight_hi = weight.first.data(),
                   .weight_lo = weight.second.data(),
                   .exp_avg = nullptr,
                   .exp_avg_sq = nullptr,
                   .grad = nullptr,
                   .numel = weight.first.size()},
                  exp_avg, exp_avg_sq, grad, steps, grad_scale, isa);
        },
        "weight"_a.noconvert(), "exp_avg"_a.noconvert(), "exp_avg_sq"_a.noconvert(),
        "grad"_a.noconvert().none(), "steps"_a.noconvert(), "grad_scale"_a = 1.0f, "isa"_a = nb::none());

    m.def(
        "accumulate",
        [](const Array<float>& dst, const Array<const float>& src) {
            same_length(dst.size(), src.size(), "src");
            const nb::gil_scoped_release release;
            tierstore::accumulate(dst.data(), src.data(), dst.size());
        },
        "dst"_a.noconvert(), "src"_a.noconvert());
    m.def(
        "accumulate_bf16",
        [](const Array<float>& dst, const Array<const std::uint16_t>& src) {
            same_length(dst.size(), src.size(), "src");
            const nb::gil_scoped_release release;
            tierstore::accumulate_bf16(dst.data(), src.data(), dst.size());
        },
        "dst"_a.noconvert(), "src"_a.noconvert());
    m.def(
        "widen_bf16",
        [](const Array<float>& dst, const Array<const std::uint16_t>& src) {
            same_length(dst.size(), src.size(), "src");
            const nb::gil_scoped_release release;
            tierstore::widen_bf16(dst.data(), src.data(), dst.size());
        },
        "dst"_a.noconvert(), "src"_a.noconvert());
    m.def(
        "sum_of_squares",
        [](const Array<const float>& src, std::optional<InstructionSet> isa) {
            const InstructionSet chosen = isa ? *isa : tierstore::best_instruction_set();
            const nb::gil_scoped_release release;
            return tierstore::sum_of_squares_with(chosen, src.data(), src.size());
        },
        "src"_a.noconvert(), "isa"_a = nb::none());
    m.def(
        "all_finite",
        [](const Array<const float>& src) {
            const nb::gil_scoped_release release;
            return tierstore::all_finite(src.data(), src.size());
        },
        "src"_a.noconvert());

    m.def(
        "split_bf16",
        [](const Array<std::uint16_t>& hi, const Array<std::int16_t>& lo, const Array<const float>& src) {
            same_length(src.size(), hi.size(), "hi");
            same_length(src.size(), lo.size(), "lo");
            const nb::gil_scoped_release release;
            tierstore::split(hi.data(), lo.data(), src.data(), src.size());
        },
        "hi"_a.noconvert(), "lo"_a.noconvert(), "src"_a.noconvert());
    m.def(
        "merge_bf16",
        [](const Array<float>& dst, const Array<const std::uint16_t>& hi,
           const Array<const std::int16_t>& lo) {
            same_length(dst.size(), hi.size(), "hi");
            same_length(dst.size(), lo.size(), "lo");
            const nb::gil_scoped_release release;
            tierstore::merge(dst.data(), hi.data(), lo.data(), dst.size());
        },
        "dst"_a.noconvert(), "hi"_a.noconvert(), "lo"_a.noconvert());
}
