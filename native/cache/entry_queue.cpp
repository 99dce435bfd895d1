#include "native/cache/entry_queue.hpp"

#include <algorithm>

namespace tierstore {

std::uint64_t EntryQueue::oldest(const Candidates& candidates, std::uint64_t frames,
                                 std::vector<EntryId>& victims) {
    std::uint64_t freed = 0;
    for (Position at = first(); at != end_ && freed < frames; at = after(at)) {
        const EntryId entry = log_[at];
        if (!candidates.evictable(entry)) continue;
        victims.push_back(entry);
        freed += candidates.frames[entry];
    }
    return freed;
}

void EntryQueue::squeeze() {
    Position to = 0;
    Position hand = kNowhere;
    for (Position at = first_; at < end_; ++at) {
        // A hand that is not inside stays outside: at the end, as the next entry will find it.
        if (at >= hand_ && hand == kNowhere) hand = to;
        const EntryId entry = log_[at];
        if (where_[entry] != at) continue;
        where_[entry] = to;
        log_[to++] = entry;
    }
    hand_ = hand == kNowhere ? to : hand;
    first_ = 0;
    end_ = to;
    constexpr std::uint32_t kShortest = 64;
    if (to > log_.size() / 2 || log_.empty()) log_.resize(std::max(kShortest, kSpread * to));
}

}  // namespace tierstore
