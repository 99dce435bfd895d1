#include "native/engine/link.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace tierstore {

Link::Link(double bandwidth, double latency_s) : bandwidth_(bandwidth), latency_s_(latency_s) {
    if (!(bandwidth > 0)) throw std::invalid_argument("a link's bandwidth must be positive");
    if (!(latency_s >= 0 && std::isfinite(latency_s)))
        throw std::invalid_argument("a link's latency must be finite and not negative");
}

Link::Slot Link::reserve(size_t nbytes, uint64_t now_ns) {
    const double seconds = latency_s_ + static_cast<double>(nbytes) / bandwidth_;
    // Rounded up: never done before the formula says. Beyond 2^62 ns (146 years) it would not fit the clock.
    const auto taken = static_cast<uint64_t>(std::ceil(std::min(seconds * 1e9, 0x1p62)));
    std::lock_guard lock(mutex_);
    const uint64_t start = std::max(now_ns, free_at_ns_);
    free_at_ns_ = std::min(start, uint64_t{1} << 62) + taken;
    stats_.transfers += 1;
    stats_.nbytes += nbytes;
    stats_.busy_ns += taken;
    return {start, free_at_ns_};
}

Link::Stats Link::stats() {
    std::lock_guard lock(mutex_);
    return stats_;
}

}  // namespace tierstore
