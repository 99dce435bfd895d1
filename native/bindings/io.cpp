// File.
#include "native/io/file.hpp"

#include <nanobind/stl/string.h>

#include "native/bindings/bindings.hpp"
#include "native/bindings/held.hpp"
#include "native/io/backend.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tierstore;

namespace {

std::string fs_path(const nb::object& path) {
    return nb::cast<std::string>(nb::module_::import_("os").attr("fsdecode")(path));
}

}  // namespace

void bind_io(nb::module_& m) {
    nb::enum_<FileCreate>(m, "FileCreate").value("NO", FileCreate::No).value("YES", FileCreate::Yes);
    nb::enum_<DirectIo>(m, "DirectIo", "Whether a file is opened past the page cache too.")
        .value("OFF", DirectIo::Off)
        .value("AUTO", DirectIo::Auto)
        .value("ON", DirectIo::On);
    nb::enum_<IoBackend>(m, "IoBackend")
        .value("AUTO", IoBackend::Auto)
        .value("URING", IoBackend::Uring)
        .value("THREADS", IoBackend::Threads)
        .value("PMEM", IoBackend::Pmem);
    nb::enum_<MapSync>(m, "MapSync", "Whether the pmem backend's mappings make stores durable by themselves.")
        .value("OFF", MapSync::Off)
        .value("AUTO", MapSync::Auto)
        .value("ON", MapSync::On);
    nb::enum_<Priority>(m, "Priority", "DEMAND passes ahead of everything queued.")
        .value("DEMAND", Priority::Demand)
        .value("SPECULATIVE", Priority::Speculative)
        .value("WRITE_BACK", Priority::WriteBack);

    nb::class_<Held<Meter>>(m, "Meter", "What was moved to and from the files of a drive, and how long that took.")
        .def("__init__", [](Held<Meter>* self) { new (self) Held(Held<Meter>::make()); })
        .def(
            "add",
            [](const Held<Meter>& self, uint64_t read_bytes, uint64_t written_bytes, uint64_t start_ns,
               uint64_t end_ns) {
                self.ptr->read(read_bytes, start_ns, end_ns);
                self.ptr->wrote(written_bytes, start_ns, end_ns);
            },
            "read_bytes"_a, "written_bytes"_a, "start_ns"_a, "end_ns"_a)
        .def("reading", [](const Held<Meter>& self) {
            const Meter::Reading total = self.ptr->reading();
            return nb::make_tuple(total.read_bytes, total.written_bytes,
                                  static_cast<double>(total.busy_ns) * 1e-9);
        });

    nb::class_<Held<File>>(m, "File", "A file opened with and, where it can be, without the page cache.")
        .def(
            "__init__",
            [](Held<File>* self, const nb::object& path, FileCreate create, DirectIo direct,
               const Held<Meter>* meter) {
                const std::string name = fs_path(path);
                const std::shared_ptr<Meter> counted = meter ? meter->ptr : nullptr;
                nb::gil_scoped_release release;
                new (self) Held(Held<File>::make(name, create, direct, counted));
            },
            "path"_a, nb::kw_only(), "create"_a = FileCreate::No, "direct"_a = DirectIo::Auto,
            "meter"_a.none() = nb::none())
        .def_prop_ro("path", [](const Held<File>& self) { return self.ptr->path(); })
        .def_prop_ro("size", [](const Held<File>& self) { return self.ptr->size(); })
        .def_prop_ro("direct", [](const Held<File>& self) { return self.ptr->open()->direct_fd >= 0; })
        .def_prop_ro("direct_reason", [](const Held<File>& self) { return self.ptr->open()->direct_reason; })
        .def("map_sync_reason",
             [](const Held<File>& self) {
                 const OpenFilePtr file = self.ptr->open();
                 const MappedPtr mapped =
                     file->mapping.covering(file->buffered_fd, file->path, 1, MapSync::Auto);
                 return mapped ? mapped->reason() : std::string("the file is empty");
             })
        .def_prop_ro("memory_alignment",
                     [](const Held<File>& self) { return self.ptr->open()->memory_alignment; })
        .def_prop_ro("offset_alignment",
                     [](const Held<File>& self) { return self.ptr->open()->offset_alignment; })
        .def(
            "allocate",
            [](const Held<File>& self, uint64_t offset, uint64_t n) { self.ptr->allocate(offset, n); },
            "offset"_a, "nbytes"_a, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "punch", [](const Held<File>& self, uint64_t offset, uint64_t n) { self.ptr->punch(offset, n); },
            "offset"_a, "nbytes"_a, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("closed", [](const Held<File>& self) { return self.ptr->closed(); })
        .def("close", [](const Held<File>& self) { self.ptr->close(); })
        .def("__enter__", [](nb::handle self) { return nb::borrow(self); })
        .def("__exit__", [](const Held<File>& self, const nb::args&) { self.ptr->close(); });
}
