#include "native/cache/policies/lfu.hpp"

namespace tierstore {

Lfu::Lfu() : buckets_(1, Bucket{0, kNone, kNone, 0, 0}) {}

Lfu::BucketId Lfu::add_bucket_after(BucketId less, std::uint64_t count) {
    BucketId added = static_cast<BucketId>(buckets_.size());
    if (free_.empty()) {
        buckets_.emplace_back();
    } else {
        added = free_.back();
        free_.pop_back();
    }
    const BucketId more = buckets_[less].more;
    buckets_[added] = Bucket{count, kNone, kNone, less, more};
    buckets_[less].more = added;
    buckets_[more].less = added;
    return added;
}

void Lfu::remove_bucket(BucketId bucket) {
    const Bucket& gone = buckets_[bucket];
    buckets_[gone.less].more = gone.more;
    buckets_[gone.more].less = gone.less;
    free_.push_back(bucket);
}

void Lfu::link(EntryId entry, BucketId bucket) {
    Bucket& to = buckets_[bucket];
    nodes_[entry] = Node{to.newest, kNone, bucket};
    (to.newest == kNone ? to.oldest : nodes_[to.newest].newer) = entry;
    to.newest = entry;
}

void Lfu::unlink(EntryId entry) {
    const Node gone = nodes_[entry];
    Bucket& from = buckets_[gone.bucket];
    (gone.older == kNone ? from.oldest : nodes_[gone.older].newer) = gone.newer;
    (gone.newer == kNone ? from.newest : nodes_[gone.newer].older) = gone.older;
}

void Lfu::insert(EntryId entry) {
    if (entry >= nodes_.size()) nodes_.resize(entry + entry / 2 + 1);
    const BucketId least = buckets_[0].more;
    link(entry, buckets_[least].count == 1 ? least : add_bucket_after(0, 1));
}

void Lfu::hit(EntryId entry) {
    const BucketId from = nodes_[entry].bucket;
    const std::uint64_t count = buckets_[from].count + 1;
    const BucketId more = buckets_[from].more;
    const bool alone = buckets_[from].oldest == buckets_[from].newest;
    if (buckets_[more].count == count) {
        unlink(entry);
        link(entry, more);
        if (alone) remove_bucket(from);
    } else if (alone) {
        buckets_[from].count = count;
    } else {
        unlink(entry);
        link(entry, add_bucket_after(from, count));
    }
}

void Lfu::remove(EntryId entry) {
    unlink(entry);
    const BucketId from = nodes_[entry].bucket;
    if (buckets_[from].oldest == kNone) remove_bucket(from);
}

std::uint64_t Lfu::select(const Candidates& candidates, std::uint64_t frames, std::vector<EntryId>& victims) {
    std::uint64_t freed = 0;
    for (BucketId bucket = buckets_[0].more; bucket != 0 && freed < frames; bucket = buckets_[bucket].more) {
        EntryId entry = buckets_[bucket].oldest;
        for (; entry != kNone && freed < frames; entry = nodes_[entry].newer) {
            if (!candidates.evictable(entry)) continue;
            victims.push_back(entry);
            freed += candidates.frames[entry];
        }
    }
    return 0;
}

std::unique_ptr<Policy> make_lfu(const PolicyOptions& options) {
    OptionReader("lfu", options).finish();
    return std::make_unique<Lfu>();
}

}  // namespace tierstore
