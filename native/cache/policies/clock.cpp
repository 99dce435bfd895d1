#include "native/cache/policies/clock.hpp"

namespace tierstore {

void ClockPolicy::insert(EntryId entry) {
    if (entry >= counts_.size()) counts_.resize(entry + entry / 2 + 1, 0);
    counts_[entry] = 0;
    queue_.push(entry);
}

std::uint64_t ClockPolicy::select(const Candidates& candidates, std::uint64_t frames,
                                  std::vector<EntryId>& victims) {
    std::uint64_t freed = 0;
    // A spared entry becomes the newest with its counter decremented, so the walk meets it again until its counter
    // is zero. Named entries stay behind the hand.
    for (queue_.set_hand(queue_.first()); queue_.hand() != queue_.end() && freed < frames;) {
        const EntryQueue::Position at = queue_.hand();
        const EntryId entry = queue_[at];
        queue_.set_hand(at + 1);
        if (!candidates.evictable(entry)) continue;
        if (counts_[entry] > 0) {
            --counts_[entry];
            queue_.renew(entry);
            continue;
        }
        victims.push_back(entry);
        freed += candidates.frames[entry];
    }
    return 0;
}

std::unique_ptr<Policy> make_clock(const PolicyOptions& options) {
    OptionReader reader("clock", options);
    const std::uint32_t bits = reader.whole_in("bits", 1, 1, 8);
    reader.finish();
    return std::make_unique<ClockPolicy>(static_cast<std::uint8_t>((1u << bits) - 1));
}

}  // namespace tierstore
