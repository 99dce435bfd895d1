#include "native/bindings/bindings.hpp"

void bind_sim(nanobind::module_&) {}
