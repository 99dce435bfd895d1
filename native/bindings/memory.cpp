#include "native/bindings/bindings.hpp"

void bind_memory(nanobind::module_&) {}
