// Cache policies by name, those written in Python among them.
#pragma once

#include <memory>
#include <string_view>

#include "native/cache/policy.hpp"

// A native policy, or for "package.module:Class" one that calls an instance of that class, made with the options
// as keyword arguments. Needs the GIL; the policy's own methods may be called without it.
std::unique_ptr<tierstore::Policy> make_any_policy(std::string_view name,
                                                   const tierstore::PolicyOptions& options);
