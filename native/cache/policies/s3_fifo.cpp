#include "native/cache/policies/s3_fifo.hpp"

#include <algorithm>

namespace tierstore {
namespace {

constexpr std::uint8_t kMostHits = 255;
constexpr std::uint8_t kMostTurns = 3;

}  // namespace

void S3Fifo::set_capacity(std::uint64_t frames) {
    const auto part = static_cast<std::uint64_t>(static_cast<double>(frames) * options_.small_fraction);
    small_frames_ = std::max<std::uint64_t>(1, part);
    ghost_frames_ = static_cast<std::uint64_t>(static_cast<double>(frames) * options_.ghost_fraction);
}

void S3Fifo::add(EntryId entry, const EntryInfo& info) {
    lists_.add(entry, info.frames);
    if (entry >= hits_.size()) hits_.resize(entry + 1, 0);
}

void S3Fifo::miss(EntryId entry) {
    if (lists_.list_of(entry) == GHOST) lists_.move_newest(WANTED, entry);
}

void S3Fifo::insert(EntryId entry) {
    const bool fills_main = filling_ && lists_.frames(SMALL) >= small_frames_;
    lists_.move_newest(lists_.list_of(entry) == EntryLists::kNone && !fills_main ? SMALL : MAIN, entry);
    hits_[entry] = 0;
}

void S3Fifo::hit(EntryId entry) {
    if (hits_[entry] < kMostHits) ++hits_[entry];
}

void S3Fifo::remove(EntryId entry) {
    if (lists_.list_of(entry) == MAIN) {
        lists_.take(entry);
        return;
    }
    lists_.move_newest(GHOST, entry);
    while (lists_.frames(GHOST) > ghost_frames_) lists_.take_oldest(GHOST);
}

void S3Fifo::to_main(EntryId entry, Hands& hands) {
    lists_.move_newest(MAIN, entry);
    if (hands.main == EntryLists::kEnd) hands.main = entry;
}

// The next victim of the small queue, on the way to which entries move to the main one; kEnd if there is none.
EntryId S3Fifo::from_small(const Candidates& candidates, Hands& hands) {
    while (hands.small != EntryLists::kEnd) {
        const EntryId entry = hands.small;
        hands.small = lists_.newer(entry);
        if (!candidates.evictable(entry)) continue;
        hands.small_frames -= lists_.frames_of(entry);
        if (hits_[entry] < options_.move_threshold) return entry;
        hits_[entry] = 0;
        to_main(entry, hands);
    }
    return EntryLists::kEnd;
}

EntryId S3Fifo::from_main(const Candidates& candidates, Hands& hands) {
    while (hands.main != EntryLists::kEnd) {
        const EntryId entry = hands.main;
        hands.main = lists_.newer(entry);
        if (!candidates.evictable(entry)) continue;
        if (hits_[entry] == 0) return entry;
        hits_[entry] = static_cast<std::uint8_t>(std::min(hits_[entry], kMostTurns) - 1);
        to_main(entry, hands);
    }
    return EntryLists::kEnd;
}

std::uint64_t S3Fifo::select(const Candidates& candidates, std::uint64_t frames,
                             std::vector<EntryId>& victims) {
    filling_ = false;
    Hands hands{lists_.oldest(SMALL), lists_.oldest(MAIN), lists_.frames(SMALL)};
    std::uint64_t freed = 0;
    while (freed < frames) {
        const bool small = hands.small_frames >= small_frames_ && hands.small != EntryLists::kEnd;
        EntryId victim = small ? from_small(candidates, hands) : from_main(candidates, hands);
        if (victim == EntryLists::kEnd) {
            if (hands.small == EntryLists::kEnd && hands.main == EntryLists::kEnd) break;
            victim = small ? from_main(candidates, hands) : from_small(candidates, hands);
            if (victim == EntryLists::kEnd) continue;  // what left the small queue is in the main one
        }
        victims.push_back(victim);
        freed += candidates.frames[victim];
    }
    return 0;
}

std::unique_ptr<Policy> make_s3_fifo(const PolicyOptions& options) {
    OptionReader reader("s3-fifo", options);
    S3FifoOptions read;
    read.small_fraction = reader.number_in("small_fraction", read.small_fraction, 0.0, 1.0);
    read.ghost_fraction = reader.number_in("ghost_fraction", read.ghost_fraction, 0.0, 100.0);
    read.move_threshold = reader.whole_in("move_threshold", read.move_threshold, 1, kMostHits);
    reader.finish();
    return std::make_unique<S3Fifo>(read);
}

}  // namespace tierstore
