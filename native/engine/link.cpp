#include "native/engine/link.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace tierstore {
namespace {

// Beyond 2^62 ns (146 years) it would not fit the clock.
constexpr int64_t kLongest = int64_t{1} << 62;

int64_t nanoseconds(double seconds) {
    // Rounded up: never done before the formula says. What is no number is refused elsewhere, and still no cast.
    const double rounded = std::ceil(seconds * 1e9);
    return rounded > -0x1p62 && rounded < 0x1p62 ? static_cast<int64_t>(rounded) : kLongest - 1;
}

}  // namespace

Link::Link(double bandwidth, double latency_s, double burst_bytes)
    : bandwidth_(bandwidth), latency_s_(latency_s), burst_ns_(nanoseconds(burst_bytes / bandwidth)) {
    if (!(bandwidth > 0)) throw std::invalid_argument("a link's bandwidth must be positive");
    if (!(latency_s >= 0 && std::isfinite(latency_s)))
        throw std::invalid_argument("a link's latency must be finite and not negative");
    if (!(burst_bytes >= 0 && std::isfinite(burst_bytes)) || (burst_bytes > 0 && std::isinf(bandwidth)))
        throw std::invalid_argument(
            "a link's burst must be finite, not negative, and of a limited bandwidth");
}

Link::Slot Link::reserve(size_t nbytes, uint64_t now_ns) {
    const int64_t taken = nanoseconds(latency_s_ + static_cast<double>(nbytes) / bandwidth_);
    const auto now = static_cast<int64_t>(now_ns);
    std::lock_guard lock(mutex_);
    const int64_t start = std::min(std::max(now - burst_ns_, free_at_ns_), kLongest);
    free_at_ns_ = start + taken;
    stats_.transfers += 1;
    stats_.nbytes += nbytes;
    stats_.busy_ns += static_cast<uint64_t>(taken);
    const int64_t end = std::max(now, free_at_ns_);
    const int64_t patient = std::max(now, std::min(free_at_ns_, kLongest) + burst_ns_ / 2);
    return {static_cast<uint64_t>(std::clamp(start, now, end)), static_cast<uint64_t>(end),
            static_cast<uint64_t>(std::max(patient, end))};
}

Link::Stats Link::stats() {
    std::lock_guard lock(mutex_);
    return stats_;
}

double Link::level(uint64_t now_ns) {
    std::lock_guard lock(mutex_);
    const int64_t credit = std::min(static_cast<int64_t>(now_ns) - free_at_ns_, burst_ns_);
    return static_cast<double>(credit) * 1e-9 * bandwidth_;
}

void Link::set_level(double nbytes, uint64_t now_ns) {
    const double credit = std::clamp(nbytes / bandwidth_ * 1e9, -0x1p61, static_cast<double>(burst_ns_));
    std::lock_guard lock(mutex_);
    free_at_ns_ = static_cast<int64_t>(now_ns) - static_cast<int64_t>(credit);
}

void Link::block(uint64_t now_ns) {
    std::lock_guard lock(mutex_);
    if (blocking_++ == 0) blocking_since_ns_ = now_ns;
}

void Link::unblock(uint64_t now_ns) {
    std::lock_guard lock(mutex_);
    if (--blocking_ == 0) blocked_ns_ += now_ns - blocking_since_ns_;
}

uint64_t Link::blocked_ns(uint64_t now_ns) {
    std::lock_guard lock(mutex_);
    return blocked_ns_ + (blocking_ > 0 ? now_ns - blocking_since_ns_ : 0);
}

}  // namespace tierstore
