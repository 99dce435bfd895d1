#include "native/engine/failed_tickets.hpp"

#include <algorithm>
#include <utility>

namespace tierstore {

void FailedTickets::add(Ticket ticket, FailurePtr failure) {
    errors_.emplace(ticket, std::move(failure));
    if (errors_.size() <= most_errors_) return;
    const Ticket oldest = errors_.begin()->first;
    errors_.erase(errors_.begin());
    if (oldest <= lost_) return;  // it outlived what was dropped
    older_.insert(std::upper_bound(older_.begin(), older_.end(), oldest), oldest);
    if (older_.size() <= most_tickets_) return;
    // Half at once, so that each costs the same in the long run.
    const auto kept = older_.begin() + static_cast<std::ptrdiff_t>((older_.size() + 1) / 2);
    lost_ = *(kept - 1);
    older_.erase(older_.begin(), kept);
}

FailurePtr FailedTickets::find(Ticket ticket) const {
    static const FailurePtr forgotten = make_failure(ResultForgotten());
    if (const auto it = errors_.find(ticket); it != errors_.end()) return it->second;
    if (ticket <= lost_ || std::binary_search(older_.begin(), older_.end(), ticket)) return forgotten;
    return nullptr;
}

}  // namespace tierstore
