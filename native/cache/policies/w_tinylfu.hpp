#pragma once

#include <memory>
#include <vector>

#include "native/cache/entry_lists.hpp"
#include "native/cache/frequency_sketch.hpp"
#include "native/cache/policy.hpp"

namespace tierstore {

struct WTinyLfuOptions {
    double window_fraction = 0.01;    // of the capacity: the LRU window for newcomers
    double protected_fraction = 0.8;  // of the rest: the upper segment of the main SLRU
    double sample_factor = 10.0;      // of the capacity: frames requested between two halvings of the counts
};

// W-TinyLFU: Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission policy", 2017. Every requested
// entry is admitted, into the window. The oldest entries of a window that is too full are candidates for the main
// cache: if there is no room, the candidate and the oldest entry of the main cache are compared by how often they were
// requested recently, and the less requested one is the victim (the candidate, if equal). So a rejection evicts the
// candidate; nothing that is requested is ever turned away.
class WTinyLfu final : public Policy {
public:
    explicit WTinyLfu(const WTinyLfuOptions& options) : options_(options), lists_(3) {}
    void set_capacity(std::uint64_t frames) override;
    void add(EntryId entry, const EntryInfo& info) override;
    void insert(EntryId entry) override;
    void hit(EntryId entry) override;
    void remove(EntryId entry) override { lists_.take(entry); }
    void tick(Clock) override {}
    std::uint64_t select(const Candidates& candidates, std::uint64_t frames,
                         std::vector<EntryId>& victims) override;
    void prefetch(EntryId entry) const {
        lists_.prefetch(entry);
        sketch_.prefetch(keys_[entry]);
    }

private:
    enum : EntryLists::List { WINDOW = 1, PROBATION, PROTECTED };

    // The progress of a choice of victims: in each list the oldest entry that is neither chosen nor busy, and the
    // frames that are left in the window and the main cache.
    struct Ends {
        EntryId window;
        EntryId probation;
        EntryId protect;
        std::uint64_t window_frames;
        std::uint64_t main_frames;

        EntryId main() const { return probation != EntryLists::kEnd ? probation : protect; }
        bool done() const { return window == EntryLists::kEnd && main() == EntryLists::kEnd; }
    };
    EntryId past_busy(const Candidates& candidates, EntryId at) const;
    EntryId take_window(const Candidates& candidates, Ends& ends) const;
    EntryId take_main(const Candidates& candidates, Ends& ends) const;
    void admit(const Candidates& candidates, Ends& ends);

    WTinyLfuOptions options_;
    std::uint64_t window_frames_ = 0;
    std::uint64_t main_frames_ = 0;
    std::uint64_t protected_frames_ = 0;
    EntryLists lists_;
    // By entry: the key that is counted. The live cache and a replay number entries differently, but records and
    // groups alike.
    std::vector<std::uint32_t> keys_;
    FrequencySketch sketch_;
};

std::unique_ptr<Policy> make_w_tinylfu(const PolicyOptions& options);

}  // namespace tierstore
