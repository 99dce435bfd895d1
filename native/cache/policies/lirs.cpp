#include "native/cache/policies/lirs.hpp"

#include <algorithm>

namespace tierstore {

void Lirs::set_capacity(std::uint64_t frames) {
    const auto part = static_cast<std::uint64_t>(static_cast<double>(frames) * options_.hir_fraction);
    const std::uint64_t hir = std::min(frames, std::max<std::uint64_t>(1, part));
    lir_frames_ = frames - hir;
    stack_frames_ = static_cast<std::uint64_t>(static_cast<double>(frames) * options_.stack_fraction);
}

void Lirs::add(EntryId entry, const EntryInfo& info) {
    stack_.add(entry, info.frames);
    status_.add(entry, info.frames);
}

// Used while it was in S: from here on LIR, for which the bottom of S makes place.
void Lirs::promote(EntryId entry) {
    stack_.move_newest(kStack, entry);
    status_.move_newest(LIR, entry);
    while (status_.frames(LIR) > lir_frames_) {
        status_.move_newest(HIR, stack_.take_oldest(kStack));
        prune();
    }
}

// The bottom of S is LIR, always.
void Lirs::prune() {
    while (!stack_.empty(kStack)) {
        const EntryId bottom = stack_.oldest(kStack);
        if (status_.list_of(bottom) == LIR) return;
        stack_.take(bottom);
        if (status_.list_of(bottom) == GHOST) status_.take(bottom);
    }
}

void Lirs::limit() {
    while (stack_.frames(kStack) > stack_frames_ && !status_.empty(GHOST)) {
        stack_.take(status_.take_oldest(GHOST));
    }
}

void Lirs::insert(EntryId entry) {
    if (status_.list_of(entry) == GHOST) {
        promote(entry);
    } else {
        const bool room = status_.frames(LIR) + status_.frames_of(entry) <= lir_frames_;
        stack_.push_newest(kStack, entry);
        status_.push_newest(room ? LIR : HIR, entry);
        prune();
    }
    limit();
}

void Lirs::hit(EntryId entry) {
    if (status_.list_of(entry) == LIR) {
        stack_.move_newest(kStack, entry);
        prune();
    } else if (in_stack(entry)) {
        promote(entry);
    } else {
        stack_.push_newest(kStack, entry);
        status_.move_newest(HIR, entry);
        prune();
    }
    limit();
}

void Lirs::remove(EntryId entry) {
    if (status_.list_of(entry) == HIR && in_stack(entry)) {
        status_.move_newest(GHOST, entry);
        return;
    }
    status_.take(entry);
    stack_.take(entry);
    prune();
}

std::uint64_t Lirs::select(const Candidates& candidates, std::uint64_t frames,
                           std::vector<EntryId>& victims) {
    std::uint64_t freed = 0;
    const auto consider = [&](EntryId entry) {
        if (!candidates.evictable(entry)) return;
        victims.push_back(entry);
        freed += candidates.frames[entry];
    };
    for (EntryId at = status_.oldest(HIR); at != EntryLists::kEnd && freed < frames; at = status_.newer(at)) {
        consider(at);
    }
    for (EntryId at = stack_.oldest(kStack); at != EntryLists::kEnd && freed < frames;
         at = stack_.newer(at)) {
        if (status_.list_of(at) == LIR) consider(at);
    }
    return 0;
}

std::unique_ptr<Policy> make_lirs(const PolicyOptions& options) {
    OptionReader reader("lirs", options);
    LirsOptions read;
    read.hir_fraction = reader.number_in("hir_fraction", read.hir_fraction, 0.0, 1.0);
    read.stack_fraction = reader.number_in("stack_fraction", read.stack_fraction, 1.0, 100.0);
    reader.finish();
    return std::make_unique<Lirs>(read);
}

}  // namespace tierstore
