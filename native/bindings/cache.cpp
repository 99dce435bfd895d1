#include "native/bindings/bindings.hpp"

void bind_cache(nanobind::module_&) {}
