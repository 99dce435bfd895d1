#include "native/bindings/bindings.hpp"

void bind_io(nanobind::module_&) {}
