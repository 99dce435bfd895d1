// Chooses victims from the old ends of two lists, without changing either.
#pragma once

#include "native/cache/entry_lists.hpp"

namespace tierstore {

// Walks both lists from their oldest entries, skipping those that are not evictable; first_frames() is what the first
// list would hold without the entries taken.
class TwoEnds {
public:
    enum Side : std::uint8_t { FIRST, SECOND };

    TwoEnds(const EntryLists& lists, EntryLists::List first, EntryLists::List second,
            const Candidates& candidates)
        : lists_(lists),
          candidates_(candidates),
          at_{past_busy(lists.oldest(first)), past_busy(lists.oldest(second))},
          first_frames_(lists.frames(first)) {}

    bool done() const { return at_[FIRST] == EntryLists::kEnd && at_[SECOND] == EntryLists::kEnd; }
    std::uint64_t first_frames() const { return first_frames_; }

    // The oldest of the wanted side, or of the other if that has none.
    EntryId take(Side wanted) {
        const Side side = at_[wanted] != EntryLists::kEnd ? wanted : (wanted == FIRST ? SECOND : FIRST);
        const EntryId taken = at_[side];
        at_[side] = past_busy(lists_.newer(taken));
        if (side == FIRST) first_frames_ -= lists_.frames_of(taken);
        return taken;
    }

private:
    EntryId past_busy(EntryId at) const {
        while (at != EntryLists::kEnd && !candidates_.evictable(at)) at = lists_.newer(at);
        return at;
    }

    const EntryLists& lists_;
    const Candidates& candidates_;
    EntryId at_[2];
    std::uint64_t first_frames_;
};

}  // namespace tierstore
