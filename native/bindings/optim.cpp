#include "native/bindings/bindings.hpp"

void bind_optim(nanobind::module_&) {}
