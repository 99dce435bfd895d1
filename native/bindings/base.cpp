#include "native/bindings/bindings.hpp"

void bind_base(nanobind::module_&) {}
