#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "native/cache/policy.hpp"

namespace tierstore {

// Entries by how recently each was touched, with their depths. A touch appends to a log; a bit marks the last mention
// of each entry in it, and a Fenwick tree counts the bits of each block, so that a depth takes O(log entries). When
// the log is full, all but the last mentions are squeezed out.
class RecencyStack {
public:
    explicit RecencyStack(std::uint32_t entry_count);  // below 2^30

    static constexpr std::uint32_t kNever = 0;
    // How many entries, including itself, were touched no earlier than its last touch; kNever if it was not touched.
    std::uint32_t depth(EntryId entry) const {
        const std::uint32_t at = where_[entry];
        return at == kNowhere ? kNever : live_ - before(at);
    }
    void touch(EntryId entry) {
        if (end_ == log_.size()) squeeze();
        const std::uint32_t from = where_[entry];
        if (from == kNowhere) {
            ++live_;
        } else {
            mark(from, -1);
        }
        log_[end_] = entry;
        where_[entry] = end_;
        mark(end_++, 1);
    }
    void prefetch(EntryId entry) const { __builtin_prefetch(&where_[entry], 1); }

private:
    static constexpr std::uint32_t kNowhere = ~0u;
    static constexpr std::uint32_t kBlock = 512;  // positions; one line of the cache

    // The number of touched entries whose position is below `at`.
    std::uint32_t before(std::uint32_t at) const {
        std::uint32_t count = 0;
        for (std::uint32_t block = at / kBlock; block > 0; block &= block - 1) count += tree_[block];
        const std::uint32_t word = at / 64;
        for (std::uint32_t i = at / kBlock * (kBlock / 64); i < word; ++i) count += std::popcount(bits_[i]);
        return count + std::popcount(bits_[word] & ((std::uint64_t{1} << at % 64) - 1));
    }
    void mark(std::uint32_t at, std::int32_t change) {
        bits_[at / 64] ^= std::uint64_t{1} << at % 64;
        for (std::uint32_t block = at / kBlock + 1; block < tree_.size(); block += block & -block) {
            tree_[block] += static_cast<std::uint32_t>(change);
        }
    }
    void squeeze();

    std::vector<std::uint32_t> where_;  // by entry
    std::vector<EntryId> log_;
    std::vector<std::uint64_t> bits_;
    std::vector<std::uint32_t> tree_;  // tree_[b] sums the blocks of Fenwick's range that ends with b - 1
    std::uint32_t end_ = 0;
    std::uint32_t live_ = 0;
};

}  // namespace tierstore
