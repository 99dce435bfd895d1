#include "native/cache/policies/fifo.hpp"

namespace tierstore {

std::uint64_t Fifo::select(const Candidates& candidates, std::uint64_t frames,
                           std::vector<EntryId>& victims) {
    queue_.oldest(candidates, frames, victims);
    return 0;
}

std::unique_ptr<Policy> make_fifo(const PolicyOptions& options) {
    OptionReader("fifo", options).finish();
    return std::make_unique<Fifo>();
}

}  // namespace tierstore
