#include "native/cache/policies/sieve.hpp"

namespace tierstore {

void Sieve::insert(EntryId entry) {
    if (entry >= marks_.size()) marks_.resize(entry + entry / 2 + 1, kUnvisited);
    marks_[entry] = kUnvisited;
    queue_.push(entry);
}

void Sieve::remove(EntryId entry) {
    queue_.erase(entry);
    go_round();
}

std::uint64_t Sieve::select(const Candidates& candidates, std::uint64_t frames,
                            std::vector<EntryId>& victims) {
    const std::size_t named = victims.size();
    std::uint64_t freed = 0;
    EntryQueue::Position behind = queue_.hand();  // the last one that it named
    // The first round clears marks, the second names every entry that is evictable: two rounds are enough.
    for (std::uint64_t steps = 2 * std::uint64_t{queue_.size()}; steps > 0 && freed < frames; --steps) {
        go_round();
        const EntryQueue::Position at = queue_.hand();
        queue_.set_hand(at + 1);
        const EntryId entry = queue_[at];
        if (marks_[entry] == kNamed || !candidates.evictable(entry)) continue;
        if (marks_[entry] == kVisited) {
            marks_[entry] = kUnvisited;
            continue;
        }
        marks_[entry] = kNamed;
        victims.push_back(entry);
        freed += candidates.frames[entry];
        behind = at + 1;
    }
    // If too few frames can be freed, the vain search for more does not move the hand.
    queue_.set_hand(behind);
    for (std::size_t i = named; i < victims.size(); ++i) marks_[victims[i]] = kUnvisited;
    go_round();
    return 0;
}

void Sieve::go_round() {
    if (queue_.hand() == queue_.end()) queue_.set_hand(queue_.first());
}

std::unique_ptr<Policy> make_sieve(const PolicyOptions& options) {
    OptionReader("sieve", options).finish();
    return std::make_unique<Sieve>();
}

}  // namespace tierstore
