// Arena, Buffer and the tables, with numpy views that keep them alive.
#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "native/bindings/bindings.hpp"
#include "native/bindings/held.hpp"
#include "native/memory/arena.hpp"
#include "native/memory/buffer.hpp"
#include "native/memory/copy.hpp"
#include "native/memory/table.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tierstore;

namespace {

using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;
using BytesIn = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using BytesOut = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Pairs = std::vector<std::pair<size_t, size_t>>;

template <class T>
nb::capsule keep(const std::shared_ptr<T>& ptr) {
    return nb::capsule(new std::shared_ptr<T>(ptr),
                       [](void* p) noexcept { delete static_cast<std::shared_ptr<T>*>(p); });
}

Bytes view(const std::shared_ptr<Arena>& arena, void* data, size_t nbytes) {
    return Bytes(data, {nbytes}, keep(arena));
}

Bytes arena_view(const Held<Arena>& self, size_t offset, std::optional<size_t> nbytes) {
    const size_t whole = self.ptr->nbytes();
    const size_t n = nbytes.value_or(whole - std::min(offset, whole));
    if (offset > whole || n > whole - offset) throw std::out_of_range("the view is outside its arena");
    return view(self.ptr, self.ptr->data() + offset, n);
}

Buffer new_buffer(const Held<Arena>& arena, const Pairs& spans, size_t nbytes) {
    std::vector<Buffer::Extent> extents;
    extents.reserve(spans.size());
    for (const auto& [offset, capacity] : spans) extents.push_back({offset, capacity});
    return Buffer(arena.ptr, extents, nbytes);
}

Pairs buffer_spans(const Buffer& self) {
    Pairs spans;
    for (const auto& extent : self.extents()) spans.emplace_back(extent.offset, extent.capacity);
    return spans;
}

Bytes buffer_array(const Buffer& self) {
    if (!self.contiguous()) throw std::invalid_argument("the buffer is in several pieces: use arrays()");
    const auto spans = self.content();
    return view(self.arena(), spans.empty() ? self.arena()->data() : spans[0].data, self.nbytes());
}

std::vector<Bytes> buffer_arrays(const Buffer& self) {
    std::vector<Bytes> arrays;
    for (const Span& span : self.content()) arrays.push_back(view(self.arena(), span.data, span.nbytes));
    return arrays;
}

void require_size(const Buffer& self, size_t nbytes) {
    if (self.nbytes() != nbytes)
        throw std::invalid_argument("the buffer has " + std::to_string(self.nbytes()) + " bytes, the array " +
                                    std::to_string(nbytes));
}

template <class T>
void bind_table(nb::module_& m, const char* name, const char* doc) {
    using Numpy = nb::ndarray<nb::numpy, T, nb::ndim<1>>;
    nb::class_<Held<Table<T>>>(m, name, doc)
        .def(
            "__init__", [](Held<Table<T>>* self, size_t n) { new (self) Held(Held<Table<T>>::make(n)); },
            "n"_a)
        .def("__len__", [](const Held<Table<T>>& self) { return self.ptr->size(); })
        .def(
            "array",
            [](const Held<Table<T>>& self) {
                return Numpy(self.ptr->data(), {self.ptr->size()}, keep(self.ptr));
            },
            "A writable view.");
}

}  // namespace

void bind_memory(nb::module_& m) {
    nb::enum_<HugePages>(
        m, "HugePages",
        "Whether an arena asks for huge pages. ON raises OSError when the kernel grants none.")
        .value("OFF", HugePages::Off)
        .value("AUTO", HugePages::Auto)
        .value("ON", HugePages::On);

    nb::class_<Held<Arena>>(
        m, "Arena", R"(``nbytes`` of zeroed memory at a 2 MiB boundary, every page there from the start.

Raises OSError (ENOMEM) at once when it is not to be had. Meanwhile signals are handled, and ``progress`` is
called with the bytes that are there; if either raises, nothing is taken. Freed when the last of the object,
its buffers, views and operations in flight has gone.)")
        .def(
            "__init__",
            [](Held<Arena>* self, size_t nbytes, HugePages huge_pages,
               const std::function<void(size_t)>& progress) {
                const std::function<void(size_t)> told = [&progress](size_t done) {
                    nb::gil_scoped_acquire acquire;
                    if (PyErr_CheckSignals() != 0) throw nb::python_error();
                    if (progress) progress(done);
                };
                nb::gil_scoped_release release;
                new (self) Held(Held<Arena>::make(nbytes, huge_pages, told));
            },
            "nbytes"_a, "huge_pages"_a = HugePages::Auto, "progress"_a = nb::none())
        .def_prop_ro("nbytes", [](const Held<Arena>& self) { return self.ptr->nbytes(); })
        .def_prop_ro("address",
                     [](const Held<Arena>& self) { return reinterpret_cast<uintptr_t>(self.ptr->data()); })
        .def_prop_ro(
            "huge_bytes", [](const Held<Arena>& self) { return self.ptr->huge_bytes(); },
            "Bytes that huge pages back now. Reads /proc/self/smaps: not for a hot path.")
        .def("view", arena_view, "offset"_a = 0, "nbytes"_a = nb::none(),
             "A writable view of ``[offset, offset + nbytes)``, by default to the end. IndexError outside.");

    nb::class_<Buffer>(
        m, "Buffer", nb::is_weak_referenceable(),
        R"(An immutable run of ``nbytes`` bytes over spans ``(offset, capacity)`` of an arena, in bytes.

Capacity beyond ``nbytes`` is room for the padding of direct I/O. IndexError for a span outside the arena,
ValueError for spans too small.)")
        .def(
            "__init__",
            [](Buffer* self, const Held<Arena>& arena, const Pairs& spans, size_t nbytes) {
                new (self) Buffer(new_buffer(arena, spans, nbytes));
            },
            "arena"_a, "spans"_a, "nbytes"_a)
        .def_prop_ro("nbytes", &Buffer::nbytes)
        .def_prop_ro("capacity", &Buffer::capacity)
        .def_prop_ro("spans", buffer_spans)
        .def_prop_ro("contiguous", &Buffer::contiguous,
                     "Whether the content is one piece of memory (adjacent spans count as one).")
        .def("array", buffer_array,
             "A writable view of the content. ValueError when it is in several pieces.")
        .def("arrays", buffer_arrays, "Writable views of the content's pieces, in order.")
        .def(
            "copy_to",
            [](const Buffer& self, const BytesOut& out) {
                require_size(self, out.nbytes());
                nb::gil_scoped_release release;
                self.gather(reinterpret_cast<std::byte*>(out.data()));
            },
            nb::arg("out").noconvert(),
            "Gathers the content into an array of ``nbytes``; ValueError for another size.")
        .def(
            "copy_from",
            [](const Buffer& self, const BytesIn& data) {
                require_size(self, data.nbytes());
                nb::gil_scoped_release release;
                self.scatter(reinterpret_cast<const std::byte*>(data.data()));
            },
            nb::arg("data").noconvert(),
            "Scatters an array of ``nbytes`` into the content; ValueError for another size.");

    bind_table<uint32_t>(m, "CrcTable", "``n`` crc32c values that writes store and reads compare.");
    bind_table<double>(m, "DoubleTable", "``n`` float64 that operations store.");
}
