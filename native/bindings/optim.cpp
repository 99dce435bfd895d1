// AdamW, the gradient sums, the split weight, checksums and the instruction set: what tests, benchmarks and
// `doctor` need of them. Training reaches these kernels through the engine.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/variant.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

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

using tierstore::Moment;
using tierstore::MomentFormat;
using Bf16 = Array<std::uint16_t>;
using Int8 = std::pair<Array<std::uint8_t>, Array<float>>;  // codes, a scale a block
using AnyMoment = std::variant<Array<float>, Bf16, Int8>;
using Narrow = std::variant<Bf16, Int8>;
using Gradient = std::optional<std::variant<Array<const float>, Array<const std::uint16_t>>>;
using ConstNarrow =
    std::variant<Array<const std::uint16_t>, std::pair<Array<const std::uint8_t>, Array<const float>>>;

template <class Codes, class Scales>
void check_int8(std::size_t numel, const Codes& codes, const Scales& scales, const std::string& name) {
    same_length(numel, codes.size(), name.c_str());
    same_length(tierstore::moment_blocks(numel), scales.size(), (name + "'s scales").c_str());
}

// Where the values (or codes) and the scales of a moment lie, checked.
std::pair<void*, float*> pointers(const AnyMoment& moment, std::size_t numel, const char* name) {
    if (const auto* int8 = std::get_if<Int8>(&moment)) {
        check_int8(numel, int8->first, int8->second, name);
        return {int8->first.data(), int8->second.data()};
    }
    if (const auto* bf16 = std::get_if<Bf16>(&moment)) {
        same_length(numel, bf16->size(), name);
        return {bf16->data(), nullptr};
    }
    const auto& fp32 = std::get<Array<float>>(moment);
    same_length(numel, fp32.size(), name);
    return {fp32.data(), nullptr};
}

void adamw(tierstore::AdamWSpan span, const AnyMoment& exp_avg, const AnyMoment& exp_avg_sq,
           const Gradient& grad, const Steps& steps, float grad_scale, std::optional<InstructionSet> isa,
           const tierstore::RoundingCounter& counter) {
    constexpr MomentFormat formats[] = {MomentFormat::Fp32, MomentFormat::Bf16, MomentFormat::Int8};
    if (exp_avg.index() != exp_avg_sq.index())
        throw std::invalid_argument("exp_avg and exp_avg_sq differ in format");
    const auto [m, m_scale] = pointers(exp_avg, span.numel, "exp_avg");
    const auto [v, v_scale] = pointers(exp_avg_sq, span.numel, "exp_avg_sq");
    span.moments = {formats[exp_avg.index()], m, v, m_scale, v_scale};
    if (grad) {
        std::visit([&](const auto& values) { same_length(span.numel, values.size(), "grad"); }, *grad);
        if (const auto* bf16 = std::get_if<Array<const std::uint16_t>>(&*grad)) {
            span.grad_bf16 = bf16->data();
        } else {
            span.grad = std::get<Array<const float>>(*grad).data();
        }
    }
    const auto* first = reinterpret_cast<const tierstore::AdamWStep*>(steps.data());
    const std::span<const tierstore::AdamWStep> rows(first, steps.shape(0));
    const InstructionSet chosen = isa ? *isa : tierstore::best_instruction_set();
    const nb::gil_scoped_release release;
    tierstore::adamw_with(chosen, span, rows, grad_scale, counter);
}

void encode_moment(Moment moment, const Narrow& dst, const Array<const float>& src) {
    if (const auto* int8 = std::get_if<Int8>(&dst)) {
        check_int8(src.size(), int8->first, int8->second, "dst");
        const nb::gil_scoped_release release;
        tierstore::encode_int8(moment, int8->first.data(), int8->second.data(), src.data(), src.size());
    } else {
        const auto& bf16 = std::get<Bf16>(dst);
        same_length(src.size(), bf16.size(), "dst");
        const nb::gil_scoped_release release;
        tierstore::encode_bf16(bf16.data(), src.data(), src.size());
    }
}

void decode_moment(Moment moment, const Array<float>& dst, const ConstNarrow& src) {
    if (const auto* bf16 = std::get_if<Array<const std::uint16_t>>(&src)) {
        same_length(dst.size(), bf16->size(), "src");
        const nb::gil_scoped_release release;
        tierstore::widen_bf16(dst.data(), bf16->data(), dst.size());
    } else {
        const auto& [codes, scales] = std::get<1>(src);
        check_int8(dst.size(), codes, scales, "src");
        const auto* first = codes.data();
        const auto* scale = scales.data();
        const nb::gil_scoped_release release;
        tierstore::decode_int8(moment, dst.data(), first, scale, dst.size());
    }
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

    nb::enum_<MomentFormat>(m, "MomentFormat", "How AdamW's two moments are kept.")
        .value("FP32", MomentFormat::Fp32)
        .value("BF16", MomentFormat::Bf16)
        .value("INT8", MomentFormat::Int8);
    nb::enum_<Moment>(m, "Moment", "Which of AdamW's moments: their 8-bit codes differ.")
        .value("EXP_AVG", Moment::ExpAvg)
        .value("EXP_AVG_SQ", Moment::ExpAvgSq);
    m.attr("MOMENT_BLOCK") = tierstore::kMomentBlock;

    m.def(
        "adamw",
        [](const Array<float>& weight, const AnyMoment& exp_avg, const AnyMoment& exp_avg_sq,
           const Gradient& grad, const Steps& steps, float grad_scale, std::optional<InstructionSet> isa,
           std::uint64_t record_hash, std::uint64_t last_step, std::uint64_t first) {
            tierstore::AdamWSpan span{};
            span.weight = weight.data();
            span.numel = weight.size();
            adamw(span, exp_avg, exp_avg_sq, grad, steps, grad_scale, isa, {record_hash, last_step, first});
        },
        "weight"_a.noconvert(), "exp_avg"_a.noconvert(), "exp_avg_sq"_a.noconvert(),
        "grad"_a.noconvert().none(), "steps"_a.noconvert(), "grad_scale"_a = 1.0f, "isa"_a = nb::none(),
        nb::kw_only(), "record_hash"_a = 0, "last_step"_a = 0, "first"_a = 0,
        R"(AdamW steps in one pass; moments in fp32, bf16 (uint16) or pairs (uint8 codes, fp32 scales). ``grad`` is fp32
or bf16 (uint16), with the same bits.

Narrow moments are rounded after each step by a hash of ``record_hash``, the step's number (``last_step`` is
that of the last row) and the element's index in the record (``first`` is that of ``weight[0]``; with 8-bit moments a
multiple of ``MOMENT_BLOCK``).)");
    m.def(
        "adamw",
        [](const SplitWeight& weight, const AnyMoment& exp_avg, const AnyMoment& exp_avg_sq,
           const Gradient& grad, const Steps& steps, float grad_scale, std::optional<InstructionSet> isa,
           std::uint64_t record_hash, std::uint64_t last_step, std::uint64_t first) {
            same_length(weight.first.size(), weight.second.size(), "weight_lo");
            tierstore::AdamWSpan span{};
            span.weight_hi = weight.first.data();
            span.weight_lo = weight.second.data();
            span.numel = weight.first.size();
            adamw(span, exp_avg, exp_avg_sq, grad, steps, grad_scale, isa, {record_hash, last_step, first});
        },
        "weight"_a.noconvert(), "exp_avg"_a.noconvert(), "exp_avg_sq"_a.noconvert(),
        "grad"_a.noconvert().none(), "steps"_a.noconvert(), "grad_scale"_a = 1.0f, "isa"_a = nb::none(),
        nb::kw_only(), "record_hash"_a = 0, "last_step"_a = 0, "first"_a = 0);
    m.def("encode_moment", encode_moment, "moment"_a, "dst"_a.noconvert(), "src"_a.noconvert(),
          R"(Rounds a moment of a record to nearest (ties away from zero) into bf16, or into (codes, scales).

For import and conversion: steps round stochastically. Subnormals become zeros, an EXP_AVG_SQ that is not zero
none; values beyond the format's largest become that; a block of 8 bits with a NaN or infinity becomes NaN.)");
    m.def("decode_moment", decode_moment, "moment"_a, "dst"_a.noconvert(), "src"_a.noconvert(),
          "What ``encode_moment`` or steps wrote, as fp32: exactly.");

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
