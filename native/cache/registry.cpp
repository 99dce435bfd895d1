// The table of all policies, by name.
#include <cmath>
#include <sstream>
#include <stdexcept>
#include <string>

#include "native/cache/policies/arc.hpp"
#include "native/cache/policies/clock.hpp"
#include "native/cache/policies/fifo.hpp"
#include "native/cache/policies/learned_use.hpp"
#include "native/cache/policies/lfu.hpp"
#include "native/cache/policies/lfu_decay.hpp"
#include "native/cache/policies/lirs.hpp"
#include "native/cache/policies/lru.hpp"
#include "native/cache/policies/next_use.hpp"
#include "native/cache/policies/s3_fifo.hpp"
#include "native/cache/policies/sieve.hpp"
#include "native/cache/policies/slru.hpp"
#include "native/cache/policies/two_q.hpp"
#include "native/cache/policies/w_tinylfu.hpp"
#include "native/cache/policy.hpp"

namespace tierstore {
namespace {

struct Registered {
    std::string_view name;
    std::unique_ptr<Policy> (*make)(const PolicyOptions&);
};

constexpr Registered kPolicies[] = {
    {"fifo", &make_fifo},
    {"clock", &make_clock},
    {"lru", &make_lru},
    {"lfu", &make_lfu},
    {"lfu-decay", &make_lfu_decay},
    {"slru", &make_slru},
    {"2q", &make_two_q},
    {"arc", &make_arc},
    {"lirs", &make_lirs},
    {"s3-fifo", &make_s3_fifo},
    {"sieve", &make_sieve},
    {"w-tinylfu", &make_w_tinylfu},
    {"next-use", &make_next_use},
    {"learned-use", &make_learned_use},
};

}  // namespace

std::vector<std::string> policy_names() {
    std::vector<std::string> names;
    for (const Registered& policy : kPolicies) names.emplace_back(policy.name);
    return names;
}

std::unique_ptr<Policy> make_policy(std::string_view name, const PolicyOptions& options) {
    std::string known;
    for (const Registered& policy : kPolicies) {
        if (policy.name == name) return policy.make(options);
        known += (known.empty() ? "" : ", ") + std::string(policy.name);
    }
    throw std::invalid_argument("unknown cache policy '" + std::string(name) + "'; there are: " + known);
}

OptionReader::OptionReader(std::string_view policy, const PolicyOptions& options)
    : policy_(policy), options_(options) {}

bool OptionReader::has(std::string_view key) const { return options_.find(key) != options_.end(); }

double OptionReader::number(std::string_view key, double otherwise) {
    seen_[std::string(key)] = true;
    const auto found = options_.find(key);
    if (found == options_.end()) return otherwise;
    if (const double* value = std::get_if<double>(&found->second)) return *value;
    refuse(key, "a number");
}

double OptionReader::number_in(std::string_view key, double otherwise, double least, double most) {
    const double value = number(key, otherwise);
    if (value >= least && value <= most) return value;
    std::ostringstream expected;
    expected << "a number from " << least << " to " << most;
    refuse(key, expected.str());
}

std::uint32_t OptionReader::whole_in(std::string_view key, std::uint32_t otherwise, std::uint32_t least,
                                     std::uint32_t most) {
    const double value = number(key, otherwise);
    if (value >= least && value <= most && value == std::floor(value)) {
        return static_cast<std::uint32_t>(value);
    }
    refuse(key, "a whole number from " + std::to_string(least) + " to " + std::to_string(most));
}

std::string OptionReader::text(std::string_view key, std::string_view otherwise) {
    seen_[std::string(key)] = true;
    const auto found = options_.find(key);
    if (found == options_.end()) return std::string(otherwise);
    if (const std::string* value = std::get_if<std::string>(&found->second)) return *value;
    refuse(key, "a word");
}

void OptionReader::finish() const {
    for (const auto& [key, value] : options_) {
        if (seen_.find(key) == seen_.end()) {
            std::string known;
            for (const auto& [name, read] : seen_) known += (known.empty() ? "" : ", ") + name;
            throw std::invalid_argument("cache policy '" + policy_ + "' has no option '" + key +
                                        "'; it has: " + (known.empty() ? "none" : known));
        }
    }
}

void OptionReader::refuse(std::string_view key, std::string_view expected) const {
    throw std::invalid_argument("cache policy '" + policy_ + "', option '" + std::string(key) +
                                "': expected " + std::string(expected));
}

}  // namespace tierstore
