#include "native/cache/policies/lru.hpp"

namespace tierstore {

std::uint64_t Lru::select(const Candidates& candidates, std::uint64_t frames, std::vector<EntryId>& victims) {
    queue_.oldest(candidates, frames, victims);
    return 0;
}

std::unique_ptr<Policy> make_lru(const PolicyOptions& options) {
    OptionReader("lru", options).finish();
    return std::make_unique<Lru>();
}

}  // namespace tierstore
