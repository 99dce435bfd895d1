#include "native/cache/policies/two_q.hpp"

#include "native/cache/two_ends.hpp"

namespace tierstore {

void TwoQ::set_capacity(std::uint64_t frames) {
    in_frames_ = static_cast<std::uint64_t>(static_cast<double>(frames) * options_.in_fraction);
    out_frames_ = static_cast<std::uint64_t>(static_cast<double>(frames) * options_.out_fraction);
}

void TwoQ::add(EntryId entry, const EntryInfo& info) { lists_.add(entry, info.frames); }

void TwoQ::miss(EntryId entry) {
    if (lists_.list_of(entry) == OUT) lists_.move_newest(WANTED, entry);
}

void TwoQ::insert(EntryId entry) {
    lists_.move_newest(lists_.list_of(entry) == EntryLists::kNone ? IN : MAIN, entry);
}

void TwoQ::hit(EntryId entry) {
    if (lists_.list_of(entry) == MAIN) lists_.move_newest(MAIN, entry);
}

void TwoQ::remove(EntryId entry) {
    if (lists_.list_of(entry) == MAIN) {
        lists_.take(entry);
        return;
    }
    lists_.move_newest(OUT, entry);
    while (lists_.frames(OUT) > out_frames_) lists_.take_oldest(OUT);
}

std::uint64_t TwoQ::select(const Candidates& candidates, std::uint64_t frames,
                           std::vector<EntryId>& victims) {
    TwoEnds ends(lists_, IN, MAIN, candidates);
    std::uint64_t freed = 0;
    while (freed < frames && !ends.done()) {
        const EntryId victim = ends.take(ends.first_frames() > in_frames_ ? TwoEnds::FIRST : TwoEnds::SECOND);
        victims.push_back(victim);
        freed += candidates.frames[victim];
    }
    return 0;
}

std::unique_ptr<Policy> make_two_q(const PolicyOptions& options) {
    OptionReader reader("2q", options);
    TwoQOptions read;
    read.in_fraction = reader.number_in("in_fraction", read.in_fraction, 0.0, 1.0);
    read.out_fraction = reader.number_in("out_fraction", read.out_fraction, 0.0, 100.0);
    reader.finish();
    return std::make_unique<TwoQ>(read);
}

}  // namespace tierstore
