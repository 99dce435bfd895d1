#include <nanobind/ndarray.h>

#include "native/bindings/bindings.hpp"
#include "native/sim/replay.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tierstore;

namespace {

template <typename T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::span<const T> span_of(const Column<T>& array) {
    return std::span(array.data(), array.shape(0));
}

void check_columns(const TraceColumns& trace) {
    const std::size_t events = trace.kinds.size();
    bool whole = trace.at.size() == events && trace.phases.size() == events && trace.layers.size() == events &&
                 trace.offsets.size() == events + 1 && trace.flags.size() == trace.records.size() &&
                 trace.offsets.front() == 0 && trace.offsets.back() == trace.records.size();
    for (std::size_t i = 0; whole && i < events; ++i) whole = trace.offsets[i] <= trace.offsets[i + 1];
    if (!whole) throw std::invalid_argument("the columns of a trace do not fit together");
}

}  // namespace

void bind_sim(nb::module_& m) {
    nb::class_<Replay>(m, "Replay")
        .def(nb::init<Residency&>(), "residency"_a, nb::keep_alive<1, 2>())
        .def(
            "run",
            [](Replay& self, Column<std::uint8_t> kinds, Column<std::uint8_t> phases, Column<std::uint32_t> at,
               Column<std::uint32_t> layers, Column<std::uint64_t> offsets, Column<std::uint32_t> records,
               Column<std::uint16_t> flags) {
                const TraceColumns trace{span_of(kinds),  span_of(phases),  span_of(at),   span_of(layers),
                                         span_of(offsets), span_of(records), span_of(flags)};
                check_columns(trace);
                // The caller lends the residency to this thread until the call returns.
                nb::gil_scoped_release release;
                self.run(trace);
            },
            "kinds"_a.noconvert(), "phases"_a.noconvert(), "at"_a.noconvert(), "layers"_a.noconvert(), "offsets"_a.noconvert(),
            "records"_a.noconvert(), "flags"_a.noconvert())
        .def("finish", &Replay::finish, nb::call_guard<nb::gil_scoped_release>());
}
