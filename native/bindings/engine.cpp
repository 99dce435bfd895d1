#include "native/bindings/bindings.hpp"

void bind_engine(nanobind::module_&) {}
