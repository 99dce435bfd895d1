#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "native/bindings/arrays.hpp"
#include "native/bindings/bindings.hpp"
#include "native/bindings/python_policy.hpp"
#include "native/cache/event_buffer.hpp"
#include "native/cache/policies/lfu_decay.hpp"
#include "native/cache/residency.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tierstore;

namespace {

using Records = Column<std::uint32_t>;
using Flags = Column<std::uint16_t>;

nb::tuple both(Decided&& decided) {
    return nb::make_tuple(numpy(std::move(decided.kinds)), numpy(std::move(decided.entries)));
}

nb::dict traffic(const Traffic& traffic) {
    nb::dict out;
    out["hits"] = traffic.hits;
    out["misses"] = traffic.misses;
    return out;
}

nb::dict stats_dict(const ResidencyStats& stats) {
    nb::dict out;
    out["accesses"] = stats.accesses;
    out["groups"] = stats.groups;
    out["steps"] = stats.steps;
    out["hits"] = stats.hits;
    out["misses"] = stats.misses;
    out["creates"] = stats.creates;
    out["evictions"] = stats.evictions;
    out["write_backs"] = stats.write_backs;
    out["drops"] = stats.drops;
    out["starved"] = stats.starved;
    out["read_bytes"] = stats.read_bytes;
    out["written_bytes"] = stats.written_bytes;
    out["prefetch_read_bytes"] = stats.prefetch_read_bytes;
    out["useful_prefetch_bytes"] = stats.useful_prefetch_bytes;
    out["wasted_prefetch_bytes"] = stats.wasted_prefetch_bytes;
    nb::dict groups;
    const char* names[] = {"weights", "moments", "gradients"};
    for (std::uint32_t group = 0; group < kGroups; ++group)
        groups[names[group]] = traffic(stats.by_group[group]);
    out["by_group"] = groups;
    nb::list layers;
    for (const Traffic& layer : stats.by_layer) layers.append(traffic(layer));
    out["by_layer"] = layers;
    return out;
}

}  // namespace

void bind_cache(nb::module_& m) {
    // Raised with what was needed, so that a caller can name a minimum in bytes.
    static PyObject* capacity_error =
        PyErr_NewException("tierstore._native.CapacityError", PyExc_ValueError, nullptr);
    m.attr("CapacityError") = nb::borrow(capacity_error);
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const CapacityError& error) {
            nb::object raised = nb::borrow(capacity_error)(error.what());
            raised.attr("needed_frames") = error.needed_frames();
            PyErr_SetObject(capacity_error, raised.ptr());
        }
    });

    nb::enum_<Decision>(m, "Decision", nb::is_arithmetic())
        .value("HIT", Decision::HIT)
        .value("FETCH", Decision::FETCH)
        .value("CREATE", Decision::CREATE)
        .value("EVICT", Decision::EVICT)
        .value("EVICT_WRITE", Decision::EVICT_WRITE)
        .value("WRITE_BACK", Decision::WRITE_BACK)
        .value("DROP", Decision::DROP);
    nb::enum_<Scope>(m, "Scope").value("GLOBAL", Scope::GLOBAL).value("LAYER", Scope::LAYER);
    nb::enum_<GroupOrder>(m, "GroupOrder")
        .value("RESIDENT_FIRST", GroupOrder::RESIDENT_FIRST)
        .value("KEY", GroupOrder::KEY);

    m.def("policy_names", &policy_names, "The names that a cache policy may have.");
    m.def(
        "check_policy",
        [](const std::string& name, const PolicyOptions& options) { make_any_policy(name, options); },
        "name"_a, "options"_a = PolicyOptions{},
        "ValueError if there is no such policy or option, or a value is out of range.");
    m.def(
        "policy_headroom_frames",
        [](const std::string& name, const PolicyOptions& options) {
            return make_any_policy(name, options)->headroom_frames();
        },
        "name"_a, "options"_a = PolicyOptions{}, "Frames of its capacity that a policy leaves empty.");
    nb::class_<LfuDecayOptions>(m, "LfuDecayOptions")
        .def_prop_ro("variant",
                     [](const LfuDecayOptions& self) {
                         return self.variant == LfuVariant::PAPER ? "paper" : "corrected";
                     })
        .def_ro("threshold", &LfuDecayOptions::threshold)
        .def_ro("beta", &LfuDecayOptions::beta)
        .def_ro("interval", &LfuDecayOptions::interval)
        .def_prop_ro("half_life", [](const LfuDecayOptions& self) {
            return half_life(self.beta, static_cast<double>(self.interval));
        });
    m.def("lfu_decay_options", &read_lfu_decay_options, "options"_a = PolicyOptions{},
          "What 'lfu-decay' makes of its options, defaults included.");
    m.def("half_life", &half_life, "beta"_a, "interval"_a,
          "After how many steps (requests, for the paper variant) LFU-decay counts a hit half.");
    m.def("beta_for_half_life", &beta_for_half_life, "half_life"_a, "interval"_a,
          "The beta that gives this half-life when counts decay every `interval` steps.");

    nb::class_<EntryState>(m, "EntryState")
        .def_ro("resident", &EntryState::resident)
        .def_ro("dirty", &EntryState::dirty)
        .def_ro("stored", &EntryState::stored)
        .def_ro("held", &EntryState::held)
        .def_ro("pins", &EntryState::pins);

    nb::class_<ResidencyObserver>(m, "ResidencyObserver");
    nb::class_<EventBuffer, ResidencyObserver>(m, "EventBuffer")
        .def(
            "__init__",
            [](EventBuffer* self, std::size_t rows, nb::callable sink) {
                // A core may be driven without the lock, as a replay is.
                new (self) EventBuffer(rows, [sink = std::move(sink)](EventColumns&& columns) {
                    const nb::gil_scoped_acquire gil;
                    sink(numpy(std::move(columns.kinds)), numpy(std::move(columns.phases)),
                         numpy(std::move(columns.layers)), numpy(std::move(columns.at)),
                         numpy(std::move(columns.steps)), numpy(std::move(columns.offsets)),
                         numpy(std::move(columns.records)), numpy(std::move(columns.flags)));
                });
            },
            "rows"_a, "sink"_a)
        .def("flush", &EventBuffer::flush)
        .def("records",
             [](const EventBuffer& self) {
                 std::vector<std::uint32_t> layers, frames;
                 std::vector<std::uint64_t> bytes;
                 std::vector<std::uint16_t> stored;
                 for (const RecordInfo& record : self.records()) {
                     layers.push_back(record.layer);
                     frames.insert(frames.end(), record.frames.begin(), record.frames.end());
                     bytes.insert(bytes.end(), record.bytes.begin(), record.bytes.end());
                     stored.push_back(record.stored);
                 }
                 return nb::make_tuple(numpy(std::move(layers)), numpy(std::move(frames)),
                                       numpy(std::move(bytes)), numpy(std::move(stored)));
             })
        .def_prop_ro("late_records", &EventBuffer::late_records);

    nb::class_<Residency>(m, "Residency")
        .def(
            "__init__",
            [](Residency* self, std::uint64_t capacity, const std::string& policy,
               const PolicyOptions& options, Scope scope, std::uint64_t lookahead,
               const std::vector<std::uint64_t>& quotas, GroupOrder order) {
                new (self) Residency(ResidencyOptions{.capacity_frames = capacity,
                                                      .lookahead_frames = lookahead,
                                                      .scope = scope,
                                                      .layer_quotas = quotas,
                                                      .order = order,
                                                      .policy = policy,
                                                      .policy_options = options,
                                                      .make = &make_any_policy});
            },
            "capacity_frames"_a, nb::kw_only(), "policy"_a = "lfu-decay",
            "policy_options"_a = PolicyOptions{}, "scope"_a = Scope::GLOBAL, "lookahead_frames"_a = 0,
            "layer_quotas"_a = std::vector<std::uint64_t>{}, "group_order"_a = GroupOrder::RESIDENT_FIRST)
        .def("observe", &Residency::observe, "observer"_a.none())
        .def("start_at", &Residency::start_at, "step"_a)
        .def(
            "add_record",
            [](Residency& self, std::uint32_t layer, const std::array<std::uint32_t, kGroups>& frames,
               const std::array<std::uint64_t, kGroups>& bytes, std::uint16_t stored) {
                return self.add_record(RecordInfo{layer, frames, bytes, stored});
            },
            "layer"_a, "group_frames"_a, "group_bytes"_a, "stored_mask"_a)
        .def("set_stored", &Residency::set_stored, "record"_a, "mask"_a)
        .def(
            "begin_access",
            [](Residency& self, std::uint8_t phase, std::uint32_t layer, Records records, Flags flags) {
                std::vector<std::uint32_t> bounds =
                    self.begin_access(static_cast<Phase>(phase), layer, span_of(records), span_of(flags));
                const std::size_t groups = bounds.size() - 1;
                return nb::make_tuple(groups, numpy(std::move(bounds)));
            },
            "phase"_a, "layer"_a, "records"_a.noconvert(), "flags"_a.noconvert())
        .def("next_group",
             [](Residency& self) {
                 Decided demanded, ahead;
                 const std::span<const std::uint32_t> units = self.next_group(demanded, ahead);
                 return nb::make_tuple(numpy(std::vector<std::uint32_t>(units.begin(), units.end())),
                                       both(std::move(demanded)), both(std::move(ahead)));
             })
        .def(
            "end_unit",
            [](Residency& self, std::uint32_t unit) {
                Decided decided;
                self.end_unit(unit, decided);
                return both(std::move(decided));
            },
            "unit"_a)
        .def("end_group",
             [](Residency& self) {
                 Decided decided;
                 self.end_group(decided);
                 return both(std::move(decided));
             })
        .def(
            "prefetch",
            [](Residency& self, std::uint8_t phase, std::uint32_t layer, Records records, Flags flags) {
                Decided decided;
                const std::uint32_t taken = self.prefetch(static_cast<Phase>(phase), layer, span_of(records), span_of(flags), decided);
                return nb::make_tuple(taken, both(std::move(decided)));
            },
            "phase"_a, "layer"_a, "records"_a.noconvert(), "flags"_a.noconvert())
        .def("cancel_prefetch", &Residency::cancel_prefetch)
        .def(
            "pin",
            [](Residency& self, Records records, Flags flags) { self.pin(span_of(records), span_of(flags)); },
            "records"_a.noconvert(), "flags"_a.noconvert())
        .def(
            "unpin",
            [](Residency& self, Records records, Flags flags) {
                Decided decided;
                self.unpin(span_of(records), span_of(flags), decided);
                return both(std::move(decided));
            },
            "records"_a.noconvert(), "flags"_a.noconvert())
        .def(
            "clean",
            [](Residency& self, std::optional<Records> records) {
                Decided decided;
                if (records) {
                    self.clean(span_of(*records), decided);
                } else {
                    self.clean_all(decided);
                }
                return both(std::move(decided));
            },
            "records"_a.noconvert().none() = nb::none())
        .def(
            "drop",
            [](Residency& self, Records entries) {
                Decided decided;
                self.drop(span_of(entries), decided);
                return both(std::move(decided));
            },
            "entries"_a.noconvert())
        .def("end_step", &Residency::end_step)
        .def("stats", [](const Residency& self) { return stats_dict(self.stats()); })
        .def("state", &Residency::state, "entry"_a)
        .def("resident_entries", [](const Residency& self) { return numpy(self.resident_entries()); })
        .def("dirty_entries", [](const Residency& self) { return numpy(self.dirty_entries()); })
        .def_prop_ro("used_frames", &Residency::used_frames)
        .def_prop_ro("policy_failed", &Residency::policy_failed)
        .def_prop_ro("capacity_frames", [](const Residency& self) { return self.options().capacity_frames; })
        .def_prop_ro("lookahead_frames", [](const Residency& self) { return self.options().lookahead_frames; })
        .def_prop_ro("scope", [](const Residency& self) { return self.options().scope; })
        .def_prop_ro("layer_quotas", [](const Residency& self) { return self.options().layer_quotas; })
        .def_prop_ro("group_order", [](const Residency& self) { return self.options().order; })
        .def_prop_ro("policy", [](const Residency& self) { return self.options().policy; })
        .def_prop_ro("policy_options", [](const Residency& self) { return self.options().policy_options; })
        .def_prop_ro("record_count", &Residency::record_count)
        .def_prop_ro("access_open", &Residency::access_open)
        .def_prop_ro("group_open", &Residency::group_open);
}
