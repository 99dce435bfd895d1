#include "native/sim/belady.hpp"

#include <stdexcept>

namespace tierstore {

Belady::Belady(std::span<const EntryId> requests, std::uint32_t entry_count)
    : requests_(requests),
      after_(requests.size()),
      next_(entry_count, kNever),
      ahead_(requests.size()),
      done_(entry_count) {
    if (requests.size() >= kNever) throw std::invalid_argument("more than 4294967294 requests");
    for (std::size_t at = requests.size(); at-- > 0;) {
        after_[at] = next_[requests[at]];
        next_[requests[at]] = static_cast<std::uint32_t>(at);
    }
}

void Belady::advance(EntryId entry) {
    next_[entry] = after_[next_[entry]];
    if (next_[entry] == kNever) {
        done_.insert(static_cast<EntryId>(next_.size() - 1) - entry);
    } else {
        ahead_.insert(next_[entry]);
    }
}

void Belady::hit(EntryId entry) {
    ahead_.erase(next_[entry]);
    advance(entry);
}

void Belady::remove(EntryId entry) {
    if (next_[entry] == kNever) {
        done_.erase(static_cast<EntryId>(next_.size() - 1) - entry);
    } else {
        ahead_.erase(next_[entry]);
    }
}

std::uint64_t Belady::select(const Candidates& candidates, std::uint64_t frames,
                             std::vector<EntryId>& victims) {
    std::uint64_t freed = 0;
    const auto take = [&](EntryId entry) {
        if (!candidates.evictable(entry)) return;
        victims.push_back(entry);
        freed += candidates.frames[entry];
    };
    const auto last_entry = static_cast<EntryId>(next_.size() - 1);
    for (auto at = done_.last(); at != OrderedBits::kNone && freed < frames; at = done_.before(at)) {
        take(last_entry - at);
    }
    for (auto at = ahead_.last(); at != OrderedBits::kNone && freed < frames; at = ahead_.before(at)) {
        take(requests_[at]);
    }
    return 0;
}

}  // namespace tierstore
