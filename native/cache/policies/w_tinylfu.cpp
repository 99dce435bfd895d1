#include "native/cache/policies/w_tinylfu.hpp"

#include <algorithm>

namespace tierstore {

void WTinyLfu::set_capacity(std::uint64_t frames) {
    const auto whole = static_cast<double>(frames);
    const auto window = static_cast<std::uint64_t>(whole * options_.window_fraction);
    window_frames_ = std::min(frames, std::max<std::uint64_t>(1, window));
    main_frames_ = frames - window_frames_;
    protected_frames_ =
        static_cast<std::uint64_t>(static_cast<double>(main_frames_) * options_.protected_fraction);
    sketch_.reset(frames,
                  std::max<std::uint64_t>(1, static_cast<std::uint64_t>(whole * options_.sample_factor)));
}

void WTinyLfu::add(EntryId entry, const EntryInfo& info) {
    lists_.add(entry, info.frames);
    if (entry >= keys_.size()) keys_.resize(entry + 1, 0);
    keys_[entry] = info.record * kGroupStride + info.group;
}

void WTinyLfu::insert(EntryId entry) {
    sketch_.count(keys_[entry], lists_.frames_of(entry));
    lists_.push_newest(WINDOW, entry);
}

void WTinyLfu::hit(EntryId entry) {
    sketch_.count(keys_[entry], lists_.frames_of(entry));
    if (lists_.list_of(entry) != PROBATION) {
        lists_.move_newest(lists_.list_of(entry), entry);
        return;
    }
    lists_.move_newest(PROTECTED, entry);
    while (lists_.frames(PROTECTED) > protected_frames_) {
        lists_.move_newest(PROBATION, lists_.oldest(PROTECTED));
    }
}

EntryId WTinyLfu::past_busy(const Candidates& candidates, EntryId at) const {
    while (at != EntryLists::kEnd && !candidates.evictable(at)) at = lists_.newer(at);
    return at;
}

EntryId WTinyLfu::take_window(const Candidates& candidates, Ends& ends) const {
    const EntryId entry = ends.window;
    ends.window = past_busy(candidates, lists_.newer(entry));
    ends.window_frames -= lists_.frames_of(entry);
    return entry;
}

EntryId WTinyLfu::take_main(const Candidates& candidates, Ends& ends) const {
    const EntryId entry = ends.main();
    EntryId& end = ends.probation != EntryLists::kEnd ? ends.probation : ends.protect;
    end = past_busy(candidates, lists_.newer(entry));
    ends.main_frames -= lists_.frames_of(entry);
    return entry;
}

void WTinyLfu::admit(const Candidates& candidates, Ends& ends) {
    const EntryId entry = take_window(candidates, ends);
    lists_.move_newest(PROBATION, entry);
    ends.main_frames += lists_.frames_of(entry);
    if (ends.probation == EntryLists::kEnd) ends.probation = entry;
}

std::uint64_t WTinyLfu::select(const Candidates& candidates, std::uint64_t frames,
                               std::vector<EntryId>& victims) {
    Ends ends{past_busy(candidates, lists_.oldest(WINDOW)), past_busy(candidates, lists_.oldest(PROBATION)),
              past_busy(candidates, lists_.oldest(PROTECTED)), lists_.frames(WINDOW),
              lists_.frames(PROBATION) + lists_.frames(PROTECTED)};
    std::uint64_t freed = 0;
    const auto choose = [&](EntryId victim) {
        victims.push_back(victim);
        freed += candidates.frames[victim];
    };
    while (freed < frames && !ends.done()) {
        // What room is made for enters the window.
        const bool crowded = ends.window_frames + (frames - freed) > window_frames_;
        if (ends.window == EntryLists::kEnd || (!crowded && ends.main() != EntryLists::kEnd)) {
            choose(take_main(candidates, ends));
        } else if (ends.main_frames + lists_.frames_of(ends.window) <= main_frames_) {
            admit(candidates, ends);
        } else if (ends.main() != EntryLists::kEnd &&
                   sketch_.estimate(keys_[ends.window]) > sketch_.estimate(keys_[ends.main()])) {
            choose(take_main(candidates, ends));
            if (ends.main_frames + lists_.frames_of(ends.window) <= main_frames_) admit(candidates, ends);
        } else {
            choose(take_window(candidates, ends));
        }
    }
    return 0;
}

std::unique_ptr<Policy> make_w_tinylfu(const PolicyOptions& options) {
    OptionReader reader("w-tinylfu", options);
    WTinyLfuOptions read;
    read.window_fraction = reader.number_in("window_fraction", read.window_fraction, 0.0, 1.0);
    read.protected_fraction = reader.number_in("protected_fraction", read.protected_fraction, 0.0, 1.0);
    read.sample_factor = reader.number_in("sample_factor", read.sample_factor, 1.0, 1e6);
    reader.finish();
    return std::make_unique<WTinyLfu>(read);
}

}  // namespace tierstore
