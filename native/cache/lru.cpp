#include "native/cache/lru.hpp"

namespace tierstore {

Lru::Lru() : links_(1, Link{0, 0}) {}

void Lru::insert(EntryId entry) {
    const EntryId at = entry + 1;
    if (at >= links_.size()) links_.resize(at + at / 2 + 1, Link{0, 0});
    const EntryId newest = links_[0].older;
    links_[at] = Link{newest, 0};
    links_[newest].newer = at;
    links_[0].older = at;
}

void Lru::remove(EntryId entry) {
    const Link gone = link(entry);
    links_[gone.older].newer = gone.newer;
    links_[gone.newer].older = gone.older;
}

void Lru::hit(EntryId entry) {
    remove(entry);
    insert(entry);
}

std::uint64_t Lru::select(const Candidates& candidates, std::uint64_t frames,
                          std::vector<EntryId>& victims) {
    std::uint64_t freed = 0;
    for (EntryId at = links_[0].newer; at != 0 && freed < frames; at = links_[at].newer) {
        const EntryId entry = at - 1;
        if (!candidates.evictable(entry)) continue;
        victims.push_back(entry);
        freed += candidates.frames[entry];
    }
    return 0;
}

std::unique_ptr<Policy> make_lru(const PolicyOptions& options) {
    OptionReader("lru", options).finish();
    return std::make_unique<Lru>();
}

}  // namespace tierstore
