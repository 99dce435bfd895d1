#pragma once

#include <memory>
#include <vector>

#include "native/cache/entry_lists.hpp"
#include "native/cache/policy.hpp"

namespace tierstore {

struct S3FifoOptions {
    double small_fraction = 0.1;       // of the capacity: the small queue
    double ghost_fraction = 0.9;       // of the capacity: ghosts of entries that left it
    std::uint32_t move_threshold = 2;  // hits in the small queue that make an entry move to the main one
};

// S3-FIFO: Yang et al., "FIFO queues are all you need for cache eviction", 2023. A newcomer enters the small queue, or
// the main one if its ghost is found. The small queue gives the victim while it has its share: its oldest entry moves
// to the main queue if it was hit often enough, else it is evicted and leaves a ghost. The main queue gives its oldest
// entry another turn for each of at most 3 hits. Until the first victim is named, newcomers beyond the small queue's
// share fill the main one (as in the authors' code; the paper does not say).
class S3Fifo final : public Policy {
public:
    explicit S3Fifo(const S3FifoOptions& options) : options_(options), lists_(4) {}
    void set_capacity(std::uint64_t frames) override;
    void add(EntryId entry, const EntryInfo& info) override;
    void miss(EntryId entry) override;
    void insert(EntryId entry) override;
    void hit(EntryId entry) override;
    void remove(EntryId entry) override;
    void tick(Clock) override {}
    std::uint64_t select(const Candidates& candidates, std::uint64_t frames,
                         std::vector<EntryId>& victims) override;
    void prefetch(EntryId entry) const {
        lists_.prefetch(entry);
        __builtin_prefetch(&hits_[entry], 1);
    }

private:
    // WANTED: its ghost was found, and it is about to enter.
    enum : EntryLists::List { SMALL = 1, MAIN, GHOST, WANTED };

    // The progress of a choice of victims: entries older than these are victims already, or busy.
    struct Hands {
        EntryId small;
        EntryId main;
        std::uint64_t small_frames;  // without the victims
    };
    EntryId from_small(const Candidates& candidates, Hands& hands);
    EntryId from_main(const Candidates& candidates, Hands& hands);
    void to_main(EntryId entry, Hands& hands);

    S3FifoOptions options_;
    std::uint64_t small_frames_ = 0;
    std::uint64_t ghost_frames_ = 0;
    bool filling_ = true;
    EntryLists lists_;
    std::vector<std::uint8_t> hits_;
};

std::unique_ptr<Policy> make_s3_fifo(const PolicyOptions& options);

}  // namespace tierstore
