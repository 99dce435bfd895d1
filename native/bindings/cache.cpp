#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
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

using Decisions = std::pair<Numpy<std::uint8_t>, Numpy<std::uint32_t>>;

Decisions both(Decided&& decided) {
    return {numpy(std::move(decided.kinds)), numpy(std::move(decided.entries))};
}

constexpr std::pair<const char*, std::uint64_t ResidencyStats::*> kCounts[] = {
    {"accesses", &ResidencyStats::accesses},
    {"groups", &ResidencyStats::groups},
    {"steps", &ResidencyStats::steps},
    {"hits", &ResidencyStats::hits},
    {"misses", &ResidencyStats::misses},
    {"creates", &ResidencyStats::creates},
    {"evictions", &ResidencyStats::evictions},
    {"write_backs", &ResidencyStats::write_backs},
    {"drops", &ResidencyStats::drops},
    {"starved", &ResidencyStats::starved},
    {"read_bytes", &ResidencyStats::read_bytes},
    {"written_bytes", &ResidencyStats::written_bytes},
    {"prefetch_reads", &ResidencyStats::prefetch_reads},
    {"prefetch_read_bytes", &ResidencyStats::prefetch_read_bytes},
    {"useful_prefetch_bytes", &ResidencyStats::useful_prefetch_bytes},
    {"wasted_prefetch_bytes", &ResidencyStats::wasted_prefetch_bytes},
};

std::map<std::string, HitCounts> by_group(const ResidencyStats& stats) {
    return {{"weights", stats.by_group[0]}, {"moments", stats.by_group[1]}, {"gradients", stats.by_group[2]}};
}

template <typename T>
bool equal(const T& self, nb::handle other) {
    return nb::isinstance<T>(other) && self == nb::cast<const T&>(other);
}

void bind_stats(nb::module_& m) {
    nb::class_<HitCounts>(m, "HitCounts",
                          "Hits: needed and resident when requested. Misses: needed and read.")
        .def_ro("hits", &HitCounts::hits)
        .def_ro("misses", &HitCounts::misses)
        .def("__eq__", &equal<HitCounts>, nb::sig("def __eq__(self, other: object) -> bool"))
        .def("__repr__", [](const HitCounts& self) {
            return "HitCounts(hits=" + std::to_string(self.hits) + ", misses=" + std::to_string(self.misses) +
                   ")";
        });
    nb::class_<ResidencyStats> stats(
        m, "ResidencyStats", "Counts since the core was made. ``read_bytes`` has prefetched bytes too.");
    for (const auto& [name, member] : kCounts) stats.def_ro(name, member);
    stats.def_prop_ro("by_group", &by_group)
        .def_ro("by_layer", &ResidencyStats::by_layer)
        .def("__eq__", &equal<ResidencyStats>, nb::sig("def __eq__(self, other: object) -> bool"))
        .def("__repr__", [](const ResidencyStats& self) {
            std::string text = "ResidencyStats(";
            for (const auto& [name, member] : kCounts)
                text += std::string(name) + "=" + std::to_string(self.*member) + ", ";
            return text + "...)";
        });
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
    nb::enum_<GroupOrder>(m, "GroupOrder",
                          "The order in which an access that does not fit at once is cut into groups. KEY "
                          "does not depend on what is\n"
                          "resident: for ranks that must work on the same experts in the same order. GIVEN: "
                          "that of the access.")
        .value("RESIDENT_FIRST", GroupOrder::RESIDENT_FIRST)
        .value("KEY", GroupOrder::KEY)
        .value("GIVEN", GroupOrder::GIVEN);
    nb::enum_<StepClock>(
        m, "StepClock",
        "What a step is to policies: what ``end_step`` ends, or, until the first one, each access (but those "
        "of the phases\n"
        "INIT and OPTIMIZER, and with LATE_ACCESSES the first of them, as many as there are records).")
        .value("STEPS", StepClock::STEPS)
        .value("ACCESSES", StepClock::ACCESSES)
        .value("LATE_ACCESSES", StepClock::LATE_ACCESSES);

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
        .def_ro("remember", &LfuDecayOptions::remember)
        .def_prop_ro("half_life", [](const LfuDecayOptions& self) {
            return half_life(self.beta, static_cast<double>(self.interval));
        });
    m.def("lfu_decay_options", &read_lfu_decay_options, "options"_a = PolicyOptions{},
          "What 'lfu-decay' makes of its options, defaults included.");
    m.def("half_life", &half_life, "beta"_a, "interval"_a,
          "After how many steps (requests, for the paper variant) LFU-decay counts a hit half.");
    m.def("beta_for_half_life", &beta_for_half_life, "half_life"_a, "interval"_a,
          "The beta that gives this half-life when counts decay every `interval` steps.");

    bind_stats(m);
    nb::class_<EntryState>(m, "EntryState")
        .def_ro("resident", &EntryState::resident)
        .def_ro("dirty", &EntryState::dirty)
        .def_ro("stored", &EntryState::stored)
        .def_ro("held", &EntryState::held)
        .def_ro("pins", &EntryState::pins);

    nb::class_<ResidencyObserver>(m, "ResidencyObserver", "Receives the calls of a residency core.");
    nb::class_<EventBuffer, ResidencyObserver>(
        m, "EventBuffer",
        R"(Buffers events as columns and gives them to ``sink`` when there are ``rows`` of them.

The columns: kinds, phases, layers, at, steps, offsets, records, flags. What the sink raises refuses the call that
follows, with nothing changed.)")
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
            "rows"_a, "sink"_a,
            nb::sig("def __init__(self, rows: int, sink: collections.abc.Callable[..., object]) -> None"))
        .def("flush", &EventBuffer::flush, "Gives the sink what is buffered.")
        .def(
            "records",
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
                return std::tuple(numpy(std::move(layers)), numpy(std::move(frames)), numpy(std::move(bytes)),
                                  numpy(std::move(stored)));
            },
            "Of all records: layers, frames [3 each], bytes [3 each], masks of groups stored when they were "
            "added.")
        .def_prop_ro("late_records", &EventBuffer::late_records,
                     "How many of them were added after the first other event.");

    nb::class_<Residency>(
        m, "Residency",
        "What is in the budget: every decision of the host cache (native/cache/residency.hpp).")
        .def(
            "__init__",
            [](Residency* self, std::uint64_t capacity, const std::string& policy,
               const PolicyOptions& options, Scope scope, std::uint64_t lookahead,
               const std::vector<std::uint64_t>& quotas, GroupOrder order, StepClock clock,
               std::uint32_t parts) {
                new (self) Residency(ResidencyOptions{.capacity_frames = capacity,
                                                      .lookahead_frames = lookahead,
                                                      .scope = scope,
                                                      .layer_quotas = quotas,
                                                      .order = order,
                                                      .clock = clock,
                                                      .parts = parts,
                                                      .policy = policy,
                                                      .policy_options = options,
                                                      .make = &make_any_policy});
            },
            "capacity_frames"_a, nb::kw_only(), "policy"_a = "lfu-decay",
            "policy_options"_a = PolicyOptions{}, "scope"_a = Scope::GLOBAL, "lookahead_frames"_a = 0,
            "layer_quotas"_a = std::vector<std::uint64_t>{}, "group_order"_a = GroupOrder::RESIDENT_FIRST,
            "clock"_a = StepClock::STEPS, "parts"_a = 1)
        .def(
            "observe", &Residency::observe, "observer"_a.none(),
            "From now on ``observer`` receives the core's calls; None: no observer. Call it before there are "
            "records.")
        .def("start_at", &Residency::start_at, "step"_a, "Numbers the steps from ``step`` on. Call it first.")
        .def(
            "add_record",
            [](Residency& self, std::uint32_t layer, const std::array<std::uint32_t, kGroups>& frames,
               const std::array<std::uint64_t, kGroups>& bytes,
               std::uint16_t stored) { return self.add_record(RecordInfo{layer, frames, bytes, stored}); },
            "layer"_a, "group_frames"_a, "group_bytes"_a, "stored_mask"_a)
        .def(
            "add_records",
            [](Residency& self, Column<std::uint16_t> layers,
               const std::array<std::uint32_t, kGroups>& frames,
               const std::array<std::uint64_t, kGroups>& bytes, std::uint16_t stored) {
                const std::uint32_t first = self.record_count();
                for (const std::uint16_t layer : span_of(layers)) {
                    self.add_record(RecordInfo{layer, frames, bytes, stored});
                }
                return first;
            },
            "layers"_a.noconvert(), "group_frames"_a, "group_bytes"_a, "stored_mask"_a,
            "``add_record`` for a record of each of ``layers``, alike otherwise; returns the first one's "
            "number.")
        .def("set_stored", &Residency::set_stored, "record"_a, "mask"_a)
        .def(
            "begin_access",
            [](Residency& self, std::uint8_t phase, std::uint32_t layer, Records records, Flags flags) {
                std::vector<std::uint32_t> bounds =
                    self.begin_access(static_cast<Phase>(phase), layer, span_of(records), span_of(flags));
                const std::size_t groups = bounds.size() - 1;
                return std::pair(groups, numpy(std::move(bounds)));
            },
            "phase"_a, "layer"_a, "records"_a.noconvert(), "flags"_a.noconvert())
        .def("next_group",
             [](Residency& self) {
                 Decided demanded, ahead;
                 const std::span<const std::uint32_t> units = self.next_group(demanded, ahead);
                 return std::tuple(numpy(std::vector<std::uint32_t>(units.begin(), units.end())),
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
                const std::uint32_t taken = self.prefetch(static_cast<Phase>(phase), layer, span_of(records),
                                                          span_of(flags), decided);
                return std::pair(taken, both(std::move(decided)));
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
            "keep",
            [](Residency& self, Records records, Flags flags) {
                return numpy(self.keep(span_of(records), span_of(flags)));
            },
            "records"_a.noconvert(), "flags"_a.noconvert(),
            "Keep the resident ones of ``records`` (ascending), in this order, while a frame is left for "
            "others: each is pinned until it is released. Returns 1 for each that is kept.")
        .def(
            "release",
            [](Residency& self, Records records, Flags flags) {
                self.release(span_of(records), span_of(flags));
            },
            "records"_a.noconvert(), "flags"_a.noconvert(), "Release those of ``records`` that are kept.")
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
        .def("stats", &Residency::stats)
        .def("state", &Residency::state, "entry"_a)
        .def("resident_entries", [](const Residency& self) { return numpy(self.resident_entries()); })
        .def("dirty_entries", [](const Residency& self) { return numpy(self.dirty_entries()); })
        .def_prop_ro("used_frames", &Residency::used_frames)
        .def_prop_ro("policy_failed", &Residency::policy_failed)
        .def_prop_ro("clock", &Residency::clock, "What a step is now.")
        .def_prop_ro("recorded_clock", &Residency::recorded_clock, "STEPS, unless accesses have been steps.")
        .def_prop_ro("capacity_frames", [](const Residency& self) { return self.options().capacity_frames; })
        .def_prop_ro("lookahead_frames",
                     [](const Residency& self) { return self.options().lookahead_frames; })
        .def_prop_ro("scope", [](const Residency& self) { return self.options().scope; })
        .def_prop_ro("layer_quotas", [](const Residency& self) { return self.options().layer_quotas; })
        .def_prop_ro("group_order", [](const Residency& self) { return self.options().order; })
        .def_prop_ro("parts", [](const Residency& self) { return self.options().parts; })
        .def_prop_ro("policy", [](const Residency& self) { return self.options().policy; })
        .def_prop_ro("policy_options", [](const Residency& self) { return self.options().policy_options; })
        .def_prop_ro("record_count", &Residency::record_count)
        .def_prop_ro("access_open", &Residency::access_open)
        .def_prop_ro("group_open", &Residency::group_open);
}
