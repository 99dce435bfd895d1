// Cache policies by name, including those written in Python.
#pragma once

#include <memory>
#include <string_view>

#include "native/cache/policy.hpp"

// A native policy, or, for "package.module:Class", one that calls an instance of that class, created with the options
// as keyword arguments. Needs the GIL; the policy's own methods may be called without it.
std::unique_ptr<tierstore::Policy> make_any_policy(std::string_view name,
                                                   const tierstore::PolicyOptions& options);
