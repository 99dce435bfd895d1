// Engine: submitting keeps the interpreter, for it only queues; waiting and closing release it.
#include "native/engine/engine.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <limits>

#include "native/bindings/bindings.hpp"
#include "native/bindings/held.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tierstore;

namespace {

using Tickets = std::vector<Ticket>;
using Steps = nb::ndarray<const float, nb::shape<-1, 7>, nb::c_contig, nb::device::cpu>;
using HeldFile = Held<File>;
using HeldCrcs = Held<CrcTable>;
using HeldDoubles = Held<DoubleTable>;
using HeldLink = Held<Link>;

using Buffers = nb::typed<nb::sequence, Buffer>;

std::vector<Buffer> buffers(const Buffers& sequence) {
    std::vector<Buffer> out;
    for (nb::handle item : sequence) out.push_back(nb::cast<const Buffer&>(item));
    return out;
}

Transfer transfer(const HeldFile& file, uint64_t offset, const Buffers& sections, const HeldCrcs* crcs,
                  size_t first_crc, size_t align) {
    return {file.ptr->open(), offset, buffers(sections), crcs ? crcs->ptr : nullptr, first_crc, align};
}

// Waits in slices, so that a signal's handler runs (and may raise) while a long transfer goes on.
bool wait(Engine& self, Ticket ticket, std::chrono::steady_clock::time_point until) {
    constexpr auto kSlice = std::chrono::milliseconds(50);
    for (;;) {
        bool finished;
        {
            nb::gil_scoped_release release;
            const auto left = until - std::chrono::steady_clock::now();
            finished = self.wait(ticket, std::min<std::chrono::nanoseconds>(left, kSlice));
        }
        if (finished) return true;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (std::chrono::steady_clock::now() >= until) return false;
    }
}

std::chrono::steady_clock::time_point deadline(std::optional<double> timeout_s) {
    if (!timeout_s || *timeout_s > 1e8) return std::chrono::steady_clock::time_point::max();
    return std::chrono::steady_clock::now() +
           std::chrono::nanoseconds(static_cast<int64_t>(*timeout_s * 1e9));
}

void wait_all(Engine& self, const Tickets& tickets, std::optional<double> timeout_s) {
    const auto until = deadline(timeout_s);
    for (Ticket ticket : tickets) {
        if (wait(self, ticket, until)) continue;
        PyErr_Format(PyExc_TimeoutError, "ticket %llu has not finished",
                     static_cast<unsigned long long>(ticket));
        throw nb::python_error();
    }
}

nb::dict stats(Engine& self) {
    const EngineStats s = self.stats();
    nb::dict d;
    d["read_bytes"] = s.read_bytes;
    d["written_bytes"] = s.written_bytes;
    d["reads"] = s.reads;
    d["writes"] = s.writes;
    d["syncs"] = s.syncs;
    d["compute_ops"] = s.compute_ops;
    d["failed_ops"] = s.failed_ops;
    d["kept_failures"] = s.kept_failures;
    d["continued_transfers"] = s.continued_transfers;
    d["read_s"] = static_cast<double>(s.read_ns) * 1e-9;
    d["write_s"] = static_cast<double>(s.write_ns) * 1e-9;
    d["sync_s"] = static_cast<double>(s.sync_ns) * 1e-9;
    d["compute_s"] = static_cast<double>(s.compute_ns) * 1e-9;
    d["waiting"] = s.waiting;
    d["in_flight"] = s.in_flight;
    return d;
}

void init(Engine* self, IoBackend backend, size_t io_threads, size_t queue_depth, size_t chunk_bytes,
          size_t compute_threads, const std::vector<int>& lease_fds, MapSync map_sync,
          const nb::object& log_path, size_t kept_errors, size_t kept_failures) {
    EngineOptions options;
    options.backend = backend;
    options.io = {io_threads, queue_depth, chunk_bytes, lease_fds, map_sync};
    options.compute_threads = compute_threads;
    options.failures = FailedTickets(kept_errors, kept_failures);
    if (!log_path.is_none()) options.log_path = path_of(log_path);
    nb::gil_scoped_release release;
    new (self) Engine(options);
}

Ticket adamw(Engine& self, const Buffers& weight, const Buffer& exp_avg, const Buffer& exp_avg_sq,
             const Buffer* grad, const Steps& steps, float grad_scale, MomentFormat moments,
             const Buffers& scales, uint64_t record_hash, uint64_t last_step, const HeldDoubles* squares,
             size_t index, const Tickets& after, Priority priority) {
    AdamWRecord record{buffers(weight), exp_avg,     exp_avg_sq, buffers(scales), {},
                       moments,         record_hash, last_step};
    if (grad) record.grad.push_back(*grad);
    if (squares) {
        record.squares = squares->ptr;
        record.squares_index = index;
    }
    std::vector<AdamWStep> copied;
    for (size_t i = 0; i < steps.shape(0); ++i) {
        const float* s = steps.data() + 7 * i;
        copied.push_back({s[0], s[1], s[2], s[3], s[4], s[5], s[6]});
    }
    size_t nbytes = record.exp_avg.nbytes() + record.exp_avg_sq.nbytes();
    for (const Buffer& part : record.weight) nbytes += part.nbytes();
    for (const Buffer& part : record.scales) nbytes += part.nbytes();
    return self.compute(adamw_work(std::move(record), std::move(copied), grad_scale, self.compute_threads()),
                        {after, priority}, {Activity::AdamW, nbytes});
}

void bind_transfers(nb::class_<Engine>& engine) {
    engine
        .def(
            "read",
            [](Engine& self, const HeldFile& file, uint64_t offset, const Buffers& sections,
               const HeldCrcs* crcs, size_t first_crc, size_t align, const Tickets& after,
               Priority priority) {
                return self.read(transfer(file, offset, sections, crcs, first_crc, align), {after, priority});
            },
            "file"_a, "offset"_a, "sections"_a, "crcs"_a.none() = nb::none(), "first_crc"_a = 0,
            nb::kw_only(), "align"_a = 4096, "after"_a = nb::make_tuple(), "priority"_a = Priority::Demand,
            R"(Reads sections that follow one another from ``offset``, each padded to ``align`` (a power of two).

Every section needs room for its padding. With ``crcs``, section i is compared with ``crcs[first_crc + i]``
as it stands when the bytes have arrived.)")
        .def(
            "verify_mapped",
            [](Engine& self, const HeldFile& file, uint64_t offset, const Buffer& section,
               const HeldCrcs& crcs, size_t crc, const Tickets& after, Priority priority) {
                Transfer mapped{file.ptr->open(), offset, {section}, crcs.ptr, crc};
                return self.compute(verify_mapped_work(std::move(mapped)), {after, priority},
                                    {Activity::Read, section.nbytes()});
            },
            "file"_a, "offset"_a, "section"_a, "crcs"_a, "crc"_a, nb::kw_only(), "after"_a = nb::make_tuple(),
            "priority"_a = Priority::Demand,
            "Compares a section where ``file.map(offset, ...)`` has it with ``crcs[crc]``; fails as a read "
            "does.")
        .def(
            "write",
            [](Engine& self, const HeldFile& file, uint64_t offset, const Buffers& sections,
               const HeldCrcs* crcs, size_t first_crc, size_t align, const Tickets& after,
               Priority priority) {
                return self.write(transfer(file, offset, sections, crcs, first_crc, align),
                                  {after, priority});
            },
            "file"_a, "offset"_a, "sections"_a, "crcs"_a.none() = nb::none(), "first_crc"_a = 0,
            nb::kw_only(), "align"_a = 4096, "after"_a = nb::make_tuple(), "priority"_a = Priority::WriteBack,
            "Writes sections as ``read`` reads them; zeroes their padding and stores their checksums first.")
        .def(
            "sync",
            [](Engine& self, const HeldFile& file, const Tickets& after, Priority priority) {
                return self.sync(file.ptr->open(), {after, priority});
            },
            "file"_a, nb::kw_only(), "after"_a = nb::make_tuple(), "priority"_a = Priority::Demand,
            "fdatasync: what ``after`` names is durable once it is done.")
        .def(
            "punch",
            [](Engine& self, const HeldFile& file, uint64_t offset, uint64_t nbytes, const Tickets& after,
               Priority priority) { return self.punch(file.ptr->open(), offset, nbytes, {after, priority}); },
            "file"_a, "offset"_a, "nbytes"_a, nb::kw_only(), "after"_a = nb::make_tuple(),
            "priority"_a = Priority::WriteBack,
            "Gives blocks back: they read as zeros. A failure poisons nothing.");
}

void bind_compute(nb::class_<Engine>& engine) {
    engine
        .def(
            "copy",
            [](Engine& self, const Buffer& dst, const Buffer& src, const Tickets& after, Priority priority) {
                return self.compute(copy_work(dst, src), {after, priority}, {Activity::Copy, dst.nbytes()});
            },
            "dst"_a, "src"_a, nb::kw_only(), "after"_a = nb::make_tuple(), "priority"_a = Priority::Demand)
        .def(
            "fill_zero",
            [](Engine& self, const Buffer& dst, const Tickets& after, Priority priority) {
                return self.compute(fill_zero_work(dst), {after, priority},
                                    {Activity::FillZero, dst.nbytes()});
            },
            "dst"_a, nb::kw_only(), "after"_a = nb::make_tuple(), "priority"_a = Priority::Demand)
        .def(
            "widen",
            [](Engine& self, const Buffer& dst, const Buffer& src, Dtype src_dtype, const Tickets& after,
               Priority priority) {
                return self.compute(widen_work(dst, src, src_dtype), {after, priority},
                                    {Activity::Copy, dst.nbytes()});
            },
            "dst"_a, "src"_a, "src_dtype"_a, nb::kw_only(), "after"_a = nb::make_tuple(),
            "priority"_a = Priority::Demand, "``dst = src``, exactly; dst is fp32.")
        .def(
            "accumulate",
            [](Engine& self, const Buffer& dst, const Buffer& src, Dtype src_dtype, const Tickets& after,
               Priority priority) {
                return self.compute(accumulate_work(dst, src, src_dtype), {after, priority},
                                    {Activity::Accumulate, dst.nbytes()});
            },
            "dst"_a, "src"_a, "src_dtype"_a = Dtype::Fp32, nb::kw_only(), "after"_a = nb::make_tuple(),
            "priority"_a = Priority::Demand, "``dst += src``; dst is fp32.")
        .def(
            "sum_of_squares",
            [](Engine& self, const Buffer& src, const HeldDoubles& out, size_t index, Dtype src_dtype,
               const Tickets& after, Priority priority) {
                return self.compute(sum_of_squares_work(src, src_dtype, out.ptr, index), {after, priority},
                                    {Activity::SumOfSquares, src.nbytes()});
            },
            "src"_a, "out"_a, "index"_a, "src_dtype"_a = Dtype::Fp32, nb::kw_only(),
            "after"_a = nb::make_tuple(), "priority"_a = Priority::Demand,
            "``out[index]`` = the sum of squares of src; the same bits wherever its spans lie.")
        .def(
            "adamw", adamw, "weight"_a, "exp_avg"_a, "exp_avg_sq"_a, "grad"_a.none(), "steps"_a.noconvert(),
            "grad_scale"_a = 1.0f, nb::kw_only(), "moments"_a = MomentFormat::Fp32,
            "scales"_a = nb::make_tuple(), "record_hash"_a = 0, "last_step"_a = 0,
            "squares"_a.none() = nb::none(), "index"_a = 0, "after"_a = nb::make_tuple(),
            "priority"_a = Priority::Demand,
            R"(AdamW steps over one record in one pass. ``weight`` is [fp32] or [bf16 rounding, int16 remainder].

``steps`` is [k, 7], copied: lr, beta1, beta2, eps, weight_decay, bias_correction1, sqrt(bias_correction2).
All but the last step have a zero gradient. ``grad`` is fp32 or bf16, as its size says; the bits are the same.

``moments`` says what exp_avg and exp_avg_sq hold: fp32; bf16 (uint16); or 8-bit codes (uint8), with
``scales`` [exp_avg's, exp_avg_sq's], fp32, one for every ``MOMENT_BLOCK`` elements of the record. Narrow moments
are rounded after each step by a hash of ``record_hash`` (64 bits that name the record), the step's number
(``last_step`` is the last row's, those above it count back) and the element's index: threads, spans, instruction
sets and replays give the same bits.

``squares[index]`` = the gradient's sum of squares before it is scaled, with the bits of ``sum_of_squares``, from the
same read of memory.)");
}

void bind_waiting(nb::class_<Engine>& engine) {
    engine
        .def(
            "barrier",
            [](Engine& self, const Tickets& after, Priority priority) {
                return self.barrier({after, priority});
            },
            "after"_a = nb::make_tuple(), nb::kw_only(), "priority"_a = Priority::Demand,
            "Done when all of ``after`` is done.")
        .def(
            "external",
            [](Engine& self, const Tickets& after, Priority priority) {
                return self.external({after, priority});
            },
            nb::kw_only(), "after"_a = nb::make_tuple(), "priority"_a = Priority::Demand,
            "Done when complete_external() was called and ``after`` is done: for events outside the engine.")
        .def(
            "hold",
            [](Engine& self, const HeldLink& link, size_t nbytes, Activity activity, const Tickets& after,
               Priority priority) { return self.hold(link.ptr, {after, priority}, {activity, nbytes}); },
            "link"_a, "nbytes"_a, "activity"_a = Activity::Other, nb::kw_only(), "after"_a = nb::make_tuple(),
            "priority"_a = Priority::Demand,
            R"(Done at the end of a transfer of ``nbytes`` on ``link`` that is requested when ``after`` is done.

It moves nothing: it runs in parallel to the operation that does, and a barrier joins the two. The link serves in
order of requests, whatever the priorities. Cancelled, it keeps its turn on the link.)")
        .def("complete_external", &Engine::complete_external, "ticket"_a, "error"_a = "",
             "Ends an external operation; with an ``error`` it fails (RuntimeError).")
        .def(
            "wait",
            [](Engine& self, Ticket ticket, std::optional<double> timeout_s) {
                wait_all(self, {ticket}, timeout_s);
            },
            "ticket"_a, "timeout_s"_a = nb::none(),
            R"(Returns when the operation succeeded, raises its error, or TimeoutError. Makes it urgent.

May be called again, and late: very old failures are raised as ResultForgotten.)")
        .def("wait_all", wait_all, "tickets"_a, "timeout_s"_a = nb::none(),
             "Waits for each in turn; raises the first error met.")
        .def("done", &Engine::done, "ticket"_a, "Whether it has finished, with or without failure.")
        .def("cancel", &Engine::cancel, "ticket"_a,
             "Cancels an operation that has not started; it and what follows it fail with CancelledError.")
        .def("promote", &Engine::promote, "ticket"_a,
             "Makes it, and what it waits for, as urgent as a demanded one.")
        .def("event_fd", &Engine::event_fd,
             "Readable when a ticket given to notify() has finished. Belongs to the engine.")
        .def("notify", &Engine::notify, "ticket"_a)
        .def("drain_notified", &Engine::drain_notified,
             "The tickets given to notify() that have finished since the last call.");
}

void bind_link(nb::module_& m) {
    nb::class_<HeldLink>(
        m, "Link",
        R"(A link of ``bandwidth`` (bytes a second) and ``latency`` (seconds) whose transfers follow one another.

A transfer that is requested at ``now`` ends at ``max(now, end of the one before) + latency + nbytes /
bandwidth``, rounded up to a nanosecond. ValueError unless the bandwidth is positive and the latency finite
and not negative.

With a ``burst`` (bytes) it is a token bucket: time unused is credit, at most the burst, and a transfer for
which there is credit ends at once. A hold that no caller waits for ends only when half of the burst is
available again.)")
        .def(
            "__init__",
            [](HeldLink* self, double bandwidth, double latency, double burst) {
                new (self) HeldLink(HeldLink::make(bandwidth, latency, burst));
            },
            "bandwidth"_a = std::numeric_limits<double>::infinity(), "latency"_a = 0.0, "burst"_a = 0.0)
        .def_prop_ro("bandwidth", [](const HeldLink& self) { return self.ptr->bandwidth(); })
        .def_prop_ro("latency", [](const HeldLink& self) { return self.ptr->latency_s(); })
        .def(
            "reserve",
            [](const HeldLink& self, size_t nbytes, std::optional<uint64_t> now_ns) {
                return self.ptr->reserve(nbytes, now_ns ? *now_ns : monotonic_ns()).end_ns;
            },
            "nbytes"_a, "now_ns"_a = nb::none(),
            "The end of a transfer requested now, in ns of CLOCK_MONOTONIC. The caller must wait until "
            "then.")
        .def(
            "level",
            [](const HeldLink& self, std::optional<uint64_t> now_ns) {
                return self.ptr->level(now_ns ? *now_ns : monotonic_ns());
            },
            "now_ns"_a = nb::none(), "Bytes of credit: at most the burst, negative where transfers wait.")
        .def(
            "set_level",
            [](const HeldLink& self, double nbytes, std::optional<uint64_t> now_ns) {
                self.ptr->set_level(nbytes, now_ns ? *now_ns : monotonic_ns());
            },
            "nbytes"_a, "now_ns"_a = nb::none())
        .def_prop_ro(
            "blocked_ns", [](const HeldLink& self) { return self.ptr->blocked_ns(monotonic_ns()); },
            "Time in which callers waited for at least one hold that only this link delayed.")
        .def(
            "stats",
            [](const HeldLink& self) {
                const Link::Stats s = self.ptr->stats();
                nb::dict d;
                d["transfers"] = s.transfers;
                d["nbytes"] = s.nbytes;
                d["busy_s"] = static_cast<double>(s.busy_ns) * 1e-9;
                return d;
            },
            "``transfers``, ``nbytes``, ``busy_s`` since it was made.",
            nb::sig("def stats(self) -> dict[str, typing.Any]"));
}

// As tuples: a timeline drains thousands of them at once.
nb::tuple drain_spans(Engine& self) {
    const auto [spans, overwritten] = self.drain_spans();
    nb::list out;
    for (const OperationSpan& span : spans)
        out.append(nb::make_tuple(span.label.activity, span.held, span.ticket, span.start_ns, span.end_ns,
                                  span.label.nbytes));
    return nb::make_tuple(out, overwritten);
}

}  // namespace

void bind_engine(nb::module_& m) {
    nb::enum_<Activity>(m, "Activity", "What an operation does.")
        .value("OTHER", Activity::Other)
        .value("READ", Activity::Read)
        .value("WRITE", Activity::Write)
        .value("SYNC", Activity::Sync)
        .value("PUNCH", Activity::Punch)
        .value("COPY", Activity::Copy)
        .value("FILL_ZERO", Activity::FillZero)
        .value("ACCUMULATE", Activity::Accumulate)
        .value("SUM_OF_SQUARES", Activity::SumOfSquares)
        .value("ADAMW", Activity::AdamW);
    bind_link(m);
    nb::enum_<Dtype>(m, "Dtype").value("FP32", Dtype::Fp32).value("BF16", Dtype::Bf16);

    nb::class_<Engine> engine(
        m, "Engine",
        R"(Background operations. Each method returns a ticket at once; ``after`` names earlier tickets only.

A failed operation fails all that follow it with the same error, which each waiter gets: OSError
with errno and path, ChecksumMismatch, CancelledError, EngineClosed. Arguments that cannot work are a
ValueError at once. After a failed write or sync no later one is tried (``poisoned``).

The newest ``kept_errors`` failures keep their error, and ``kept_failures`` before them their ticket: a very old
result is a failure (ResultForgotten) rather than a wrong success.)");
    engine.def("__init__", init, nb::kw_only(), "backend"_a = IoBackend::Auto, "io_threads"_a = 4,
               "queue_depth"_a = 32, "chunk_bytes"_a = 1 << 20, "compute_threads"_a = 1,
               "lease_fds"_a = std::vector<int>{}, "map_sync"_a = MapSync::Auto, "log_path"_a = nb::none(),
               "kept_errors"_a = 4096, "kept_failures"_a = 1 << 20,
               nb::sig("def __init__(self, *, backend: IoBackend = tierstore._native.IoBackend.AUTO, "
                       "io_threads: int = 4, "
                       "queue_depth: int = 32, chunk_bytes: int = 1048576, compute_threads: int = 1, "
                       "lease_fds: Sequence[int] = (), map_sync: MapSync = tierstore._native.MapSync.AUTO, "
                       "log_path: str | os.PathLike[str] | None = None, kept_errors: int = 4096, "
                       "kept_failures: int = 1048576) -> None"));
    bind_transfers(engine);
    bind_compute(engine);
    bind_waiting(engine);
    engine
        .def("stats", stats,
             "Bytes, operations and seconds of service by kind since the start; what waits and runs now.",
             nb::sig("def stats(self) -> dict[str, typing.Any]"))
        .def_prop_ro("backend", &Engine::backend_name, "``uring``, ``threads`` or ``pmem``.")
        .def_prop_ro(
            "backend_reason", [](Engine& self) { return self.backend_reason(); },
            "Why AUTO fell back; empty when it did not.")
        .def_prop_ro(
            "poisoned",
            [](Engine& self) -> std::optional<nb::str> {
                const FailurePtr failure = self.poisoned();
                return failure ? std::optional(text_of(failure->message())) : std::nullopt;
            },
            "The error of the first write or sync that failed.")
        .def("record_spans", &Engine::record_spans, "capacity"_a,
             "From now on remembers when the last ``capacity`` operations ran (0: none of them).")
        .def(
            "drain_spans", drain_spans,
            R"((activity, held, ticket, start_ns, end_ns, nbytes) of what ended since the last call, in order of ending,
and how many more were overwritten before it. ``held``: the turn on a limited link, not the operation itself.)",
            nb::sig("def drain_spans(self) -> tuple[list[tuple[Activity, bool, int, int, int, int]], int]"))
        .def(
            "log_mark", [](Engine& self, const std::string& text) { self.log_mark(text); }, "text"_a,
            "A mark in the event log; nothing without ``log_path``.")
        .def("close", &Engine::close, nb::call_guard<nb::gil_scoped_release>(),
             "Lets what is running finish, fails the rest with EngineClosed, joins the threads.")
        .def(
            "__enter__", [](nb::handle self) { return nb::borrow(self); },
            nb::sig("def __enter__(self) -> typing.Self"))
        .def(
            "__exit__",
            [](Engine& self, const nb::args&) {
                nb::gil_scoped_release release;
                self.close();
            },
            nb::sig("def __exit__(self, *args: object) -> None"));
}
