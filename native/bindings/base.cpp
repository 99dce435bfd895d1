// Native failures as Python exceptions.
#include "native/base/error.hpp"

#include <nanobind/stl/string.h>

#include "native/bindings/bindings.hpp"

namespace nb = nanobind;
using namespace tierstore;

namespace {

// The module's exception types. Never freed: a failure may be translated as late as interpreter shutdown.
struct Types {
    PyObject* checksum_mismatch;
    PyObject* cancelled;
    PyObject* closed;
    PyObject* forgotten;
};

void set_os_error(const SyscallError& error) {
    const std::string message = error.operation + ": " + std::generic_category().message(error.err);
    const nb::object args = error.path.empty()
                                ? nb::object(nb::make_tuple(error.err, message))
                                : nb::object(nb::make_tuple(error.err, message, text_of(error.path)));
    nb::object exception = nb::steal(PyObject_Call(PyExc_OSError, args.ptr(), nullptr));
    if (!exception.is_valid()) return;  // Python has set its own
    if (error.file_offset >= 0) exception.attr("file_offset") = error.file_offset;
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
}

void set_checksum_mismatch(const ChecksumMismatch& error, PyObject* type) {
    const nb::str path = text_of(error.path);
    nb::object exception =
        nb::borrow(type)(text_of(error.what()), path, error.file_offset, error.section_index);
    exception.attr("path") = path;
    exception.attr("file_offset") = error.file_offset;
    exception.attr("section_index") = error.section_index;
    exception.attr("expected") = error.expected;
    exception.attr("actual") = error.actual;
    PyErr_SetObject(type, exception.ptr());
}

void translate(const std::exception_ptr& pointer, void* payload) {
    const auto& types = *static_cast<const Types*>(payload);
    try {
        std::rethrow_exception(pointer);
    } catch (const SyscallError& error) {
        set_os_error(error);
    } catch (const ChecksumMismatch& error) {
        set_checksum_mismatch(error, types.checksum_mismatch);
    } catch (const Cancelled& error) {
        PyErr_SetObject(types.cancelled, text_of(error.what()).ptr());
    } catch (const EngineClosed& error) {
        PyErr_SetObject(types.closed, text_of(error.what()).ptr());
    } catch (const ResultForgotten& error) {
        PyErr_SetObject(types.forgotten, text_of(error.what()).ptr());
    }
}

PyObject* new_type(nb::module_& m, const char* name, const char* doc, PyObject* base) {
    const std::string full = std::string("tierstore._native.") + name;
    PyObject* type = PyErr_NewExceptionWithDoc(full.c_str(), doc, base, nullptr);
    if (!type) nb::raise_python_error();
    m.attr(name) = nb::borrow(type);
    return type;
}

}  // namespace

std::string path_of(const nb::object& path) {
    const nb::object bytes = nb::module_::import_("os").attr("fsencode")(path);
    return {nb::cast<nb::bytes>(bytes).c_str(), nb::len(bytes)};
}

nb::str text_of(const std::string& text) {
    return nb::steal<nb::str>(
        PyUnicode_DecodeFSDefaultAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
}

void bind_base(nb::module_& m) {
    static Types types;
    types.checksum_mismatch = new_type(
        m, "ChecksumMismatch",
        "A section read from a file is not what was written there. ``args`` is (message, path, file_offset,\n"
        "section_index).",
        PyExc_Exception);
    types.cancelled =
        new_type(m, "CancelledError",
                 "The operation, or one that it follows, was cancelled before it started.", PyExc_Exception);
    types.closed = new_type(m, "EngineClosed", "The engine was closed before the operation started.",
                            PyExc_RuntimeError);
    types.forgotten = new_type(m, "ResultForgotten",
                               "The operation failed, or may have, too long ago for its error to be kept.",
                               PyExc_RuntimeError);
    nb::register_exception_translator(translate, &types);
}
