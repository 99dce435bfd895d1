#include "native/cache/policies/slru.hpp"

namespace tierstore {

Slru::Slru(std::uint32_t segments)
    : lists_(static_cast<EntryLists::List>(segments)), share_(segments + 1, 0) {}

void Slru::set_capacity(std::uint64_t frames) {
    const std::uint64_t segments = share_.size() - 1;
    for (std::size_t list = 1; list <= segments; ++list) share_[list] = frames / segments;
    share_[1] += frames % segments;
}

void Slru::add(EntryId entry, const EntryInfo& info) { lists_.add(entry, info.frames); }

void Slru::insert(EntryId entry) {
    EntryLists::List into = 1;
    for (EntryLists::List list = 1; list < share_.size(); ++list) {
        if (lists_.frames(list) + lists_.frames_of(entry) <= share_[list]) {
            into = list;
            break;
        }
    }
    lists_.push_newest(into, entry);
}

void Slru::hit(EntryId entry) {
    const EntryLists::List from = lists_.list_of(entry);
    const auto highest = static_cast<EntryLists::List>(share_.size() - 1);
    EntryLists::List list = from < highest ? static_cast<EntryLists::List>(from + 1) : highest;
    lists_.move_newest(list, entry);
    for (; list > 1; --list) {
        while (lists_.frames(list) > share_[list]) {
            lists_.move_newest(static_cast<EntryLists::List>(list - 1), lists_.oldest(list));
        }
    }
}

std::uint64_t Slru::select(const Candidates& candidates, std::uint64_t frames,
                           std::vector<EntryId>& victims) {
    std::uint64_t freed = 0;
    for (EntryLists::List list = 1; list < share_.size(); ++list) {
        for (EntryId at = lists_.oldest(list); at != EntryLists::kEnd && freed < frames;
             at = lists_.newer(at)) {
            if (!candidates.evictable(at)) continue;
            victims.push_back(at);
            freed += candidates.frames[at];
        }
    }
    return 0;
}

std::unique_ptr<Policy> make_slru(const PolicyOptions& options) {
    OptionReader reader("slru", options);
    const std::uint32_t segments = reader.whole_in("segments", 4, 1, 64);
    reader.finish();
    return std::make_unique<Slru>(segments);
}

}  // namespace tierstore
