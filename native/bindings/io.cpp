// File.
#include "native/io/file.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cctype>
#include <string>

#include "native/bindings/bindings.hpp"
#include "native/bindings/held.hpp"
#include "native/io/backend.hpp"
#include "native/memory/buffer.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tierstore;

void bind_io(nb::module_& m) {
    nb::enum_<FileAccess>(m, "FileAccess")
        .value("READ_WRITE", FileAccess::ReadWrite)
        .value("READ", FileAccess::Read);
    nb::enum_<FileCreate>(m, "FileCreate").value("NO", FileCreate::No).value("YES", FileCreate::Yes);
    nb::enum_<DirectIo>(
        m, "DirectIo",
        "Whether a file is opened past the page cache too. ON raises OSError where it cannot be.")
        .value("OFF", DirectIo::Off)
        .value("AUTO", DirectIo::Auto)
        .value("ON", DirectIo::On);
    nb::enum_<IoBackend> backends(m, "IoBackend");
    for (const KnownBackend& known : kIoBackends) {
        std::string member = known.name;
        std::ranges::transform(member, member.begin(), ::toupper);
        backends.value(member.c_str(), known.value);
    }
    nb::enum_<MapSync>(
        m, "MapSync",
        "Whether the pmem backend's mappings make stores durable by themselves. ON fails where they\n"
        "cannot.")
        .value("OFF", MapSync::Off)
        .value("AUTO", MapSync::Auto)
        .value("ON", MapSync::On);
    nb::enum_<Priority>(
        m, "Priority",
        "DEMAND passes ahead of everything queued; the others go in order of arrival, but IDLE work\n"
        "only when a compute thread has no other, the last queued first.")
        .value("DEMAND", Priority::Demand)
        .value("SPECULATIVE", Priority::Speculative)
        .value("WRITE_BACK", Priority::WriteBack)
        .value("IDLE", Priority::Idle);

    nb::class_<Held<Meter>>(
        m, "Meter",
        "What was moved to and from the files that share it, and how long anything was under way.")
        .def("__init__", [](Held<Meter>* self) { new (self) Held(Held<Meter>::make()); })
        .def(
            "add",
            [](const Held<Meter>& self, uint64_t read_bytes, uint64_t written_bytes, uint64_t start_ns,
               uint64_t end_ns) {
                self.ptr->read(read_bytes, start_ns, end_ns);
                self.ptr->wrote(written_bytes, start_ns, end_ns);
            },
            "read_bytes"_a, "written_bytes"_a, "start_ns"_a, "end_ns"_a,
            "Counts a transfer that took the interval, as the engine does for those of its files.")
        .def(
            "reading",
            [](const Held<Meter>& self) {
                const Meter::Reading total = self.ptr->reading();
                return std::tuple(total.read_bytes, total.written_bytes,
                                  static_cast<double>(total.busy_ns) * 1e-9);
            },
            "Bytes read, bytes written, and seconds in which at least one transfer or sync was under way.");

    nb::class_<Held<File>>(
        m, "File",
        R"(A file opened for reading and writing, or for reading alone, through the page cache and, where it can be, past it.

Its transfers and syncs are counted by ``meter``, if any.)")
        .def(
            "__init__",
            [](Held<File>* self, const nb::object& path, FileCreate create, DirectIo direct,
               FileAccess access, const Held<Meter>* meter) {
                const std::string name = path_of(path);
                const std::shared_ptr<Meter> counted = meter ? meter->ptr : nullptr;
                nb::gil_scoped_release release;
                new (self) Held(Held<File>::make(name, create, direct, access, counted));
            },
            "path"_a, nb::kw_only(), "create"_a = FileCreate::No, "direct"_a = DirectIo::Auto,
            "access"_a = FileAccess::ReadWrite, "meter"_a.none() = nb::none(),
            nb::sig("def __init__(self, path: str | os.PathLike[str], *, create: FileCreate = "
                    "tierstore._native.FileCreate.NO, "
                    "direct: DirectIo = tierstore._native.DirectIo.AUTO, "
                    "access: FileAccess = tierstore._native.FileAccess.READ_WRITE, meter: Meter | None = "
                    "None) -> "
                    "None"))
        .def_prop_ro("path", [](const Held<File>& self) { return text_of(self.ptr->path()); })
        .def_prop_ro("size", [](const Held<File>& self) { return self.ptr->size(); })
        .def(
            "fileno", [](const Held<File>& self) { return self.ptr->open()->buffered_fd; },
            "The descriptor through the page cache, which closes with the file. OSError (EBADF) once closed.")
        .def_prop_ro("direct", [](const Held<File>& self) { return self.ptr->open()->direct_fd >= 0; })
        .def_prop_ro(
            "direct_reason", [](const Held<File>& self) { return self.ptr->open()->direct_reason; },
            "Why there is no direct I/O; empty when there is.")
        .def(
            "map_sync_reason",
            [](const Held<File>& self) {
                const OpenFilePtr file = self.ptr->open();
                const MappedPtr mapped =
                    file->mapping.covering(file->buffered_fd, file->path, 1, MapSync::Auto, file->access);
                return mapped ? mapped->reason() : std::string("the file is empty");
            },
            "Why a mapping of the file needs a sync (msync); empty where stores are durable by themselves.")
        .def_prop_ro("memory_alignment",
                     [](const Held<File>& self) { return self.ptr->open()->memory_alignment; })
        .def_prop_ro("offset_alignment",
                     [](const Held<File>& self) { return self.ptr->open()->offset_alignment; })
        .def(
            "allocate",
            [](const Held<File>& self, uint64_t offset, uint64_t n) { self.ptr->allocate(offset, n); },
            "offset"_a, "nbytes"_a,
            "Reserves blocks, lengthening the file. OSError (ENOSPC) when they are not to be had.",
            nb::call_guard<nb::gil_scoped_release>())
        .def(
            "punch", [](const Held<File>& self, uint64_t offset, uint64_t n) { self.ptr->punch(offset, n); },
            "offset"_a, "nbytes"_a, "Gives blocks back: they read as zeros. The size stays.",
            nb::call_guard<nb::gil_scoped_release>())
        .def(
            "map",
            [](const Held<File>& self, uint64_t offset, size_t nbytes) {
                const OpenFilePtr file = self.ptr->open();
                const MappedPtr mapped = file->leased.covering(file->buffered_fd, file->path, offset + nbytes,
                                                               MapSync::Off, FileAccess::Read);
                if (!mapped) {
                    SyscallError error(EIO, "map: unexpected end of file", file->path);
                    error.file_offset = static_cast<int64_t>(offset);
                    throw error;
                }
                auto arena = std::make_shared<Arena>(mapped, mapped->data() + offset, nbytes);
                return Buffer(std::move(arena), {{0, nbytes}}, nbytes);
            },
            "offset"_a, "nbytes"_a,
            R"(The bytes where a read-only mapping of the file has them: a write to them is a segmentation fault.

The mapping stays, also once the file is closed, until the last of its buffers and views has gone. OSError (EIO)
beyond the file's end.)",
            nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("closed", [](const Held<File>& self) { return self.ptr->closed(); })
        .def(
            "close", [](const Held<File>& self) { self.ptr->close(); },
            "Operations in flight keep their descriptors until they have ended.")
        .def(
            "__enter__", [](nb::handle self) { return nb::borrow(self); },
            nb::sig("def __enter__(self) -> typing.Self"))
        .def(
            "__exit__", [](const Held<File>& self, const nb::args&) { self.ptr->close(); },
            nb::sig("def __exit__(self, *args: object) -> None"));
}
