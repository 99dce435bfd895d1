// What module.cpp needs of each room's bindings.
#pragma once

#include <nanobind/nanobind.h>

void bind_base(nanobind::module_& m);
void bind_memory(nanobind::module_& m);
void bind_tables(nanobind::module_& m);
void bind_io(nanobind::module_& m);
void bind_engine(nanobind::module_& m);
void bind_optim(nanobind::module_& m);
void bind_quant(nanobind::module_& m);
void bind_torch(nanobind::module_& m);
void bind_cache(nanobind::module_& m);
void bind_python_policy(nanobind::module_& m);
void bind_sim(nanobind::module_& m);
