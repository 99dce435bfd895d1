#include "native/cache/policies/arc.hpp"

#include <algorithm>

#include "native/cache/two_ends.hpp"

namespace tierstore {

void Arc::add(EntryId entry, const EntryInfo& info) { lists_.add(entry, info.frames); }

void Arc::miss(EntryId entry) {
    const EntryLists::List ghost = lists_.list_of(entry);
    missed_b2_ = ghost == B2;
    if (ghost != B1 && ghost != B2) return;
    const auto mine = static_cast<double>(lists_.frames(ghost));
    const auto others = static_cast<double>(lists_.frames(ghost == B1 ? B2 : B1));
    const double step = std::max(1.0, others / mine) * lists_.frames_of(entry);
    target_ = ghost == B1 ? std::min(target_ + step, static_cast<double>(capacity_))
                          : std::max(target_ - step, 0.0);
    lists_.move_newest(WANTED, entry);
}

void Arc::insert(EntryId entry) {
    lists_.move_newest(lists_.list_of(entry) == EntryLists::kNone ? T1 : T2, entry);
    // |T1| + |B1| <= c and |T1| + |T2| + |B1| + |B2| <= 2c: the oldest ghosts are forgotten.
    while (lists_.frames(T1) + lists_.frames(B1) > capacity_ && !lists_.empty(B1)) lists_.take_oldest(B1);
    const std::uint64_t others = lists_.frames(T1) + lists_.frames(T2) + lists_.frames(B1);
    while (others + lists_.frames(B2) > 2 * capacity_ && !lists_.empty(B2)) lists_.take_oldest(B2);
}

void Arc::remove(EntryId entry) { lists_.move_newest(lists_.list_of(entry) == T1 ? B1 : B2, entry); }

std::uint64_t Arc::select(const Candidates& candidates, std::uint64_t frames, std::vector<EntryId>& victims) {
    TwoEnds ends(lists_, T1, T2, candidates);
    std::uint64_t freed = 0;
    while (freed < frames && !ends.done()) {
        const auto recent = static_cast<double>(ends.first_frames());
        const bool over = recent > target_ || (recent == target_ && missed_b2_);
        const EntryId victim = ends.take(recent > 0.0 && over ? TwoEnds::FIRST : TwoEnds::SECOND);
        victims.push_back(victim);
        freed += candidates.frames[victim];
    }
    return 0;
}

std::unique_ptr<Policy> make_arc(const PolicyOptions& options) {
    OptionReader("arc", options).finish();
    return std::make_unique<Arc>();
}

}  // namespace tierstore
