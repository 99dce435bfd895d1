// What module.cpp needs from the bindings of each directory.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

// File names are bytes, and their text in Python need not be UTF-8 (PEP 383): every path, and every message that may
// contain one, is converted by these functions.
std::string path_of(const nanobind::object& path);
nanobind::str text_of(const std::string& text);

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
