#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "native/base/crc32c.hpp"
#include "native/bindings/arrays.hpp"
#include "native/bindings/bindings.hpp"
#include "native/memory/key_table.hpp"
#include "native/memory/number_set.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tierstore;

namespace {

std::uint32_t index_of(const KeyTable& self, std::int64_t number) {
    if (number < 0 || number >= self.size()) throw nb::index_error("no such key");
    return static_cast<std::uint32_t>(number);
}

nb::str text(std::string_view key) { return nb::str(key.data(), key.size()); }

void bind_number_set(nb::module_& m) {
    nb::class_<NumberSet>(
        m, "NumberSet",
        "A set of numbers (u32) as bits: for numbers that lie close together, in little memory.")
        .def(nb::init<>())
        .def("__len__", &NumberSet::size)
        .def("__contains__", &NumberSet::contains, "number"_a)
        .def("add", &NumberSet::add, "number"_a, "Returns whether it was not there.")
        .def("discard", &NumberSet::discard, "number"_a, "Returns whether it was there.")
        .def("clear", &NumberSet::clear)
        .def(
            "update",
            [](NumberSet& self, Column<std::uint32_t> numbers) {
                for (const std::uint32_t number : span_of(numbers)) self.add(number);
            },
            nb::arg("numbers").noconvert(), "Adds them all.")
        .def(
            "difference_update",
            [](NumberSet& self, Column<std::uint32_t> numbers) {
                for (const std::uint32_t number : span_of(numbers)) self.discard(number);
            },
            nb::arg("numbers").noconvert(), "Removes those of them that are there.")
        .def(
            "pop_first",
            [](NumberSet& self) {
                if (self.size() == 0) throw nb::index_error("the set is empty");
                const std::uint32_t first = self.first();
                self.discard(first);
                return first;
            },
            "Removes the smallest and returns it. IndexError if there is none.")
        .def(
            "smallest", [](const NumberSet& self, std::size_t count) { return numpy(self.smallest(count)); },
            "count"_a, "The ``count`` smallest, ascending, or all.")
        .def(
            "largest", [](const NumberSet& self, std::size_t count) { return numpy(self.largest(count)); },
            "count"_a, "The ``count`` largest, ascending, or all.")
        .def(
            "array", [](const NumberSet& self) { return numpy(self.smallest(self.size())); },
            "All of them, ascending.");
}

void bind_key_table(nb::module_& m) {
    nb::class_<KeyTable>(m, "KeyTable",
                         "Keys, numbered from 0 as they come: a dictionary and a list in little memory.")
        .def(nb::init<>())
        .def("__len__", &KeyTable::size)
        .def(
            "__contains__",
            [](const KeyTable& self, std::string_view key) { return self.find(key) != KeyTable::kNone; },
            "key"_a)
        .def(
            "find",
            [](const KeyTable& self, std::string_view key) {
                const std::uint32_t found = self.find(key);
                return found == KeyTable::kNone ? std::int64_t{-1} : std::int64_t{found};
            },
            "key"_a, "Its number; -1 if there is none.")
        .def("add", &KeyTable::add, "key"_a,
             "Returns the number of a new key. ValueError if it is there already.")
        .def(
            "add_all",
            [](KeyTable& self, nb::list keys) {
                for (nb::handle key : keys) {
                    char* bytes = nullptr;
                    Py_ssize_t size = 0;
                    if (PyBytes_AsStringAndSize(key.ptr(), &bytes, &size) != 0) throw nb::python_error();
                    self.add(std::string_view(bytes, static_cast<std::size_t>(size)));
                }
            },
            "keys"_a, nb::sig("def add_all(self, keys: list[bytes]) -> None"),
            "Adds keys, as UTF-8. ValueError at one that is there already.")
        .def(
            "key",
            [](const KeyTable& self, std::int64_t number) { return text(self.key(index_of(self, number))); },
            "number"_a, "IndexError if there is none.")
        .def(
            "pop",
            [](KeyTable& self) {
                if (self.size() == 0) throw nb::index_error("the table is empty");
                self.pop();
            },
            "Removes the key that came last.")
        .def(
            "ordered",
            [](const KeyTable& self, std::uint32_t count) {
                nb::list found;
                for (const std::uint32_t number : self.sorted()) {
                    if (number < count) found.append(text(self.key(number)));
                }
                return found;
            },
            "count"_a = KeyTable::kNone, nb::sig("def ordered(self, count: int = ...) -> list[str]"),
            "The keys in order, of those with numbers below ``count``.")
        .def(
            "sorted", [](const KeyTable& self) { return numpy(self.sorted()); },
            "The numbers, in the order of their keys.");
}

}  // namespace

void bind_tables(nb::module_& m) {
    bind_number_set(m);
    bind_key_table(m);
    m.def(
        "entries_crc32c",
        [](nb::bytes database, nb::list items) {
            std::uint64_t total = 0;
            const std::uint32_t begin = crc32c("", 1, crc32c(database.data(), database.size(), 0));
            for (nb::handle item : items) {
                const nb::tuple pair = nb::cast<nb::tuple>(item);
                const nb::bytes key = nb::cast<nb::bytes>(pair[0]);
                const nb::bytes value = nb::cast<nb::bytes>(pair[1]);
                const std::uint32_t named = crc32c("", 1, crc32c(key.data(), key.size(), begin));
                total += crc32c(value.data(), value.size(), named);
            }
            return total;
        },
        "database"_a, "items"_a,
        nb::sig("def entries_crc32c(database: bytes, items: list[tuple[bytes, bytes]]) -> int"),
        "The sum, modulo 2^64, of the crc32c of ``DATABASE \\0 KEY \\0 VALUE`` of each item.");
}
