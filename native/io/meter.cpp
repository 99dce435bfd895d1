#include "native/io/meter.hpp"

#include <algorithm>
#include <cstddef>

namespace tierstore {
namespace {

// A transfer that outlasts so many gaps counts some of its time twice: no drive leaves such gaps under load.
constexpr size_t kRemembered = 1024;

}  // namespace

void Meter::add(uint64_t read, uint64_t written, uint64_t start_ns, uint64_t end_ns) {
    std::lock_guard lock(mutex_);
    total_.read_bytes += read;
    total_.written_bytes += written;
    // Transfers are reported as they end, but two threads may do so in either order.
    auto at = recent_.end();
    while (at != recent_.begin() && std::prev(at)->start_ns > end_ns) --at;
    Busy merged{start_ns, std::max(start_ns, end_ns)};
    while (at != recent_.begin() && std::prev(at)->end_ns >= merged.start_ns) {
        --at;
        merged.start_ns = std::min(merged.start_ns, at->start_ns);
        merged.end_ns = std::max(merged.end_ns, at->end_ns);
        total_.busy_ns -= at->end_ns - at->start_ns;
        at = recent_.erase(at);
    }
    total_.busy_ns += merged.end_ns - merged.start_ns;
    recent_.insert(at, merged);
    if (recent_.size() > kRemembered) recent_.pop_front();
}

Meter::Reading Meter::reading() {
    std::lock_guard lock(mutex_);
    return total_;
}

}  // namespace tierstore
