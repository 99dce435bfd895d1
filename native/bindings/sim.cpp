#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "native/bindings/arrays.hpp"
#include "native/bindings/bindings.hpp"
#include "native/bindings/python_policy.hpp"
#include "native/sim/replay.hpp"
#include "native/sim/simulate.hpp"
#include "native/sim/stack_distances.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tierstore;

namespace {

std::unique_ptr<Policy> make_policy_without_gil(std::string_view name, const PolicyOptions& options) {
    const nb::gil_scoped_acquire gil;
    return make_any_policy(name, options);
}

// An empty span stands for a column that is not there: one that is there must not look like it.
template <typename T>
std::span<const T> column_or_none(const std::optional<Column<T>>& array, const char* name,
                                  std::size_t asked) {
    if (array && array->shape(0) == 0 && asked > 0) {
        throw std::invalid_argument(std::string("column '") + name + "': expected values, or to be left out");
    }
    return array ? span_of(*array) : std::span<const T>();
}

// Dicts whose keys the stub names (stub.patterns).
struct SimulationDict : nb::dict {
    static constexpr auto Name = nb::detail::const_name("SimulationResult");
};
struct StackDistancesDict : nb::dict {
    static constexpr auto Name = nb::detail::const_name("StackDistances");
};

SimulationDict result_dict(SimulationResult&& result) {
    const SimulationCounts& counts = result.counts;
    SimulationDict out;
    out["requests"] = counts.hits + counts.misses;
    out["hits"] = counts.hits;
    out["misses"] = counts.misses;
    out["evictions"] = counts.evictions;
    out["write_backs"] = counts.write_backs;
    out["missed_frames"] = counts.missed_frames;
    out["written_frames"] = counts.written_frames;
    out["missed_bytes"] = counts.missed_bytes;
    out["written_bytes"] = counts.written_bytes;
    out["starved"] = counts.starved;
    out["not_admitted"] = counts.not_admitted;
    out["step_requests"] = numpy(std::move(result.step_requests));
    out["step_misses"] = numpy(std::move(result.step_misses));
    out["step_write_backs"] = numpy(std::move(result.step_write_backs));
    out["event_missed_bytes"] = numpy(std::move(result.event_missed_bytes));
    out["event_written_bytes"] = numpy(std::move(result.event_written_bytes));
    out["event_misses"] = numpy(std::move(result.event_misses));
    out["event_write_backs"] = numpy(std::move(result.event_write_backs));
    out["layer_hits"] = numpy(std::move(result.layer_hits));
    out["layer_misses"] = numpy(std::move(result.layer_misses));
    return out;
}

void check_columns(const TraceColumns& trace) {
    const std::size_t events = trace.kinds.size();
    bool whole = trace.at.size() == events && trace.phases.size() == events &&
                 trace.layers.size() == events && trace.offsets.size() == events + 1 &&
                 trace.flags.size() == trace.records.size() && trace.offsets.front() == 0 &&
                 trace.offsets.back() == trace.records.size();
    for (std::size_t i = 0; whole && i < events; ++i) whole = trace.offsets[i] <= trace.offsets[i + 1];
    if (!whole) throw std::invalid_argument("the columns of a trace do not fit together");
}

std::vector<RecordInfo> late_records(const Column<std::uint32_t>& layers, const Column<std::uint32_t>& frames,
                                     const Column<std::uint64_t>& bytes,
                                     const Column<std::uint16_t>& stored) {
    const std::size_t count = layers.shape(0);
    if (frames.shape(0) != count * kGroups || bytes.shape(0) != count * kGroups || stored.shape(0) != count) {
        throw std::invalid_argument("the columns of records do not fit together");
    }
    std::vector<RecordInfo> records(count);
    for (std::size_t i = 0; i < count; ++i) {
        records[i] = {.layer = layers.data()[i], .frames = {}, .bytes = {}, .stored = stored.data()[i]};
        std::copy_n(frames.data() + i * kGroups, kGroups, records[i].frames.begin());
        std::copy_n(bytes.data() + i * kGroups, kGroups, records[i].bytes.begin());
    }
    return records;
}

}  // namespace

void bind_sim(nb::module_& m) {
    nb::class_<Replay>(m, "Replay")
        .def(
            "__init__",
            [](Replay* self, Residency& residency, Column<std::uint32_t> layers, Column<std::uint32_t> frames,
               Column<std::uint64_t> bytes, Column<std::uint16_t> stored) {
                new (self) Replay(residency, late_records(layers, frames, bytes, stored));
            },
            "residency"_a, "late_layers"_a.noconvert(), "late_frames"_a.noconvert(),
            "late_bytes"_a.noconvert(), "late_stored"_a.noconvert(), nb::keep_alive<1, 2>())
        .def(
            "run",
            [](Replay& self, Column<std::uint8_t> kinds, Column<std::uint8_t> phases,
               Column<std::uint32_t> at, Column<std::uint32_t> layers, Column<std::uint64_t> offsets,
               Column<std::uint32_t> records, Column<std::uint16_t> flags) {
                const TraceColumns trace{span_of(kinds),   span_of(phases),  span_of(at),   span_of(layers),
                                         span_of(offsets), span_of(records), span_of(flags)};
                check_columns(trace);
                // The caller lends the residency to this thread until the call returns.
                nb::gil_scoped_release release;
                self.run(trace);
            },
            "kinds"_a.noconvert(), "phases"_a.noconvert(), "at"_a.noconvert(), "layers"_a.noconvert(),
            "offsets"_a.noconvert(), "records"_a.noconvert(), "flags"_a.noconvert())
        .def("finish", &Replay::finish, nb::call_guard<nb::gil_scoped_release>());

    nb::enum_<Contract>(
        m, "Contract",
        "How an event's entries are requested: as one set none of which evicts another, or one after\n"
        "another.")
        .value("ATOMIC", Contract::ATOMIC)
        .value("SEQUENTIAL", Contract::SEQUENTIAL);
    nb::enum_<Detail>(m, "Detail",
                      "What is counted beside the totals: by step and layer, or by event as well.")
        .value("STEPS", Detail::STEPS)
        .value("EVENTS", Detail::EVENTS);
    nb::enum_<Oversized>(
        m, "Oversized",
        "What is done with an entry that the cache cannot hold: CapacityError, or a miss that is not "
        "admitted.")
        .value("REFUSE", Oversized::REFUSE)
        .value("BYPASS", Oversized::BYPASS);
    m.def("bound_names", &bound_names,
          "What knows the future, which simulate() takes in the place of a policy.");
    using Bytes = std::optional<Column<std::uint8_t>>;
    using Words = std::optional<Column<std::uint32_t>>;
    m.def(
        "simulate",
        [](Column<std::uint64_t> offsets, Column<std::uint32_t> entries, Bytes writes, Words layers,
           Bytes phases, Words steps, Words sizes, Words entry_layers, Words records, Bytes groups,
           std::optional<Column<std::uint64_t>> bytes, Bytes pinned, Bytes requesters,
           const std::string& policy, const PolicyOptions& policy_options, std::uint64_t capacity,
           Scope scope, const std::vector<std::uint64_t>& quotas, Contract contract, std::uint64_t warmup,
           Detail detail, GroupOrder order, Oversized oversized) {
            const std::size_t asked = entries.shape(0);
            const RequestColumns requests{.offsets = span_of(offsets),
                                          .entries = span_of(entries),
                                          .writes = column_or_none(writes, "writes", asked),
                                          .layers = column_or_none(layers, "layers", asked),
                                          .phases = column_or_none(phases, "phases", asked),
                                          .steps = column_or_none(steps, "steps", asked),
                                          .sizes = column_or_none(sizes, "sizes", asked),
                                          .layer_of = column_or_none(entry_layers, "entry_layers", asked),
                                          .records = column_or_none(records, "records", asked),
                                          .groups = column_or_none(groups, "groups", asked),
                                          .bytes = column_or_none(bytes, "bytes", asked),
                                          .pinned = column_or_none(pinned, "pinned", asked),
                                          .requesters = column_or_none(requesters, "requesters", asked)};
            const SimulationOptions options{.policy = policy,
                                            .policy_options = policy_options,
                                            .make = &make_policy_without_gil,
                                            .capacity_frames = capacity,
                                            .scope = scope,
                                            .layer_quotas = quotas,
                                            .contract = contract,
                                            .order = order,
                                            .oversized = oversized,
                                            .warmup_events = warmup,
                                            .detail = detail};
            SimulationResult result;
            {
                nb::gil_scoped_release release;
                result = simulate(requests, options);
            }
            return result_dict(std::move(result));
        },
        "offsets"_a.noconvert(), "entries"_a.noconvert(), "writes"_a.noconvert().none() = nb::none(),
        "layers"_a.noconvert().none() = nb::none(), "phases"_a.noconvert().none() = nb::none(),
        "steps"_a.noconvert().none() = nb::none(), "sizes"_a.noconvert().none() = nb::none(),
        "entry_layers"_a.noconvert().none() = nb::none(), "records"_a.noconvert().none() = nb::none(),
        "groups"_a.noconvert().none() = nb::none(), "bytes"_a.noconvert().none() = nb::none(),
        "pinned"_a.noconvert().none() = nb::none(), "requesters"_a.noconvert().none() = nb::none(),
        nb::kw_only(), "policy"_a, "options"_a = PolicyOptions{}, "capacity_frames"_a,
        "scope"_a = Scope::GLOBAL, "layer_quotas"_a = std::vector<std::uint64_t>{},
        "contract"_a = Contract::ATOMIC, "warmup_events"_a = 0, "detail"_a = Detail::STEPS,
        "group_order"_a = GroupOrder::RESIDENT_FIRST, "oversized"_a = Oversized::REFUSE,
        R"(A policy (or one that knows the future: Belady 1966) over columns: event i asks for ``entries[offsets[i]:offsets[i + 1]]``.

``writes`` and ``requesters`` (which sequences ask, a bit each) are by request; ``layers``, ``phases`` and ``steps`` (non-decreasing) are by event; ``sizes``
(frames; 1 each), ``entry_layers``, ``records`` (which entries are of one record; each of its own), ``groups``
(which of its record's an entry is; its place among neighbours), ``bytes`` (1 a frame) and ``pinned`` (never
leaves once resident) are by entry, entries being numbered from 0. Counts exactly what a Residency of this
policy counts. The first ``warmup_events`` are carried out and not counted. ValueError, naming the column, for
what does not fit together; CapacityError when what must be resident at once does not, unless ``oversized`` lets it
pass: ``not_admitted`` of the misses.)");
    m.def(
        "stack_distances",
        [](Column<std::uint64_t> offsets, Column<std::uint32_t> entries, Bytes writes, Contract contract,
           std::uint64_t warmup) {
            const RequestColumns requests{.offsets = span_of(offsets),
                                          .entries = span_of(entries),
                                          .writes = column_or_none(writes, "writes", entries.shape(0))};
            StackDistances found;
            {
                nb::gil_scoped_release release;
                found = stack_distances(requests, contract, warmup);
            }
            StackDistancesDict out;
            out["requests"] = found.requests;
            out["cold"] = found.cold;
            out["largest_event"] = found.largest_event;
            out["depths"] = numpy(std::move(found.depths));
            out["write_backs"] = numpy(std::move(found.write_backs));
            return out;
        },
        "offsets"_a.noconvert(), "entries"_a.noconvert(), "writes"_a.noconvert().none() = nb::none(),
        nb::kw_only(), "contract"_a = Contract::ATOMIC, "warmup_events"_a = 0,
        R"(LRU at every capacity in one pass over columns as of ``simulate``, entries of one size, one cache for all
(Mattson et al. 1970).)");
}
