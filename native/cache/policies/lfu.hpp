#pragma once

#include <memory>
#include <vector>

#include "native/cache/policy.hpp"

namespace tierstore {

// Least frequently used, in constant time (Shah, Mitra and Matani 2010): a list of entries for each count, with the
// counts in order. Requests are counted while an entry is resident and forgotten when it leaves; of the entries with
// the least count, the one requested longest ago is evicted. Entries that are not evictable keep their place.
class Lfu final : public Policy {
public:
    Lfu();
    void insert(EntryId entry) override;
    void hit(EntryId entry) override;
    void remove(EntryId entry) override;
    void tick(Clock) override {}
    std::uint64_t select(const Candidates& candidates, std::uint64_t frames,
                         std::vector<EntryId>& victims) override;
    void prefetch(EntryId entry) const {
        if (entry < nodes_.size()) __builtin_prefetch(&nodes_[entry], 1);
    }

private:
    using BucketId = std::uint32_t;
    static constexpr EntryId kNone = ~0u;

    struct Node {
        EntryId older;
        EntryId newer;
        BucketId bucket;
    };
    struct Bucket {
        std::uint64_t count;  // requests of each entry in the bucket
        EntryId oldest;
        EntryId newest;
        BucketId less;
        BucketId more;
    };

    BucketId add_bucket_after(BucketId less, std::uint64_t count);
    void remove_bucket(BucketId bucket);
    void link(EntryId entry, BucketId bucket);
    void unlink(EntryId entry);

    std::vector<Node> nodes_;      // by entry
    std::vector<Bucket> buckets_;  // 0 closes the ring: its `more` has the least count, its own is 0
    std::vector<BucketId> free_;
};

std::unique_ptr<Policy> make_lfu(const PolicyOptions& options);

}  // namespace tierstore
