#include "native/sim/stack_distances.hpp"

#include <algorithm>

#include "native/sim/columns.hpp"
#include "native/sim/recency_stack.hpp"

namespace tierstore {

namespace {

class StackPass {
public:
    StackPass(const RequestColumns& requests, std::uint32_t entry_count)
        : requests_(requests), stack_(entry_count), entry_count_(entry_count) {
        found_.depths.assign(std::size_t{entry_count} + 1, 0);
        if (!requests.writes.empty()) {
            clean_below_.assign(entry_count, kClean);
            write_backs_.assign(std::size_t{entry_count} + 2, 0);
        }
    }

    StackDistances run(Contract contract, std::uint64_t warmup_events) {
        for (std::size_t event = 0; event < requests_.events(); ++event) {
            if (event == warmup_events) forget();
            const std::uint64_t begin = requests_.offsets[event];
            const std::uint64_t end = requests_.offsets[event + 1];
            if (contract == Contract::ATOMIC) {
                run_set(event, begin, end);
            } else {
                for (std::uint64_t at = begin; at < end; ++at) run_set(event, at, at + 1);
            }
        }
        if (requests_.events() <= warmup_events) forget();
        leave_all();
        // From where each begins and ends to how many there are.
        std::int64_t open = 0;
        for (std::size_t i = 0; i + 1 < write_backs_.size(); ++i) {
            open += write_backs_[i];
            found_.write_backs.push_back(static_cast<std::uint64_t>(open));
        }
        return std::move(found_);
    }

private:
    static constexpr std::uint32_t kClean = ~0u;

    void run_set(std::size_t event, std::uint64_t begin, std::uint64_t end) {
        found_.largest_event = std::max(found_.largest_event, end - begin);
        // All depths are those before the set's own requests.
        for (std::uint64_t at = begin; at < end; ++at) {
            if (at + kAhead < requests_.entries.size()) stack_.prefetch(requests_.entries[at + kAhead]);
            const EntryId entry = requests_.entries[at];
            const std::uint32_t depth = stack_.depth(entry);
            ++found_.requests;
            if (depth == RecencyStack::kNever) {
                ++found_.cold;
            } else {
                ++found_.depths[depth];
            }
            if (!clean_below_.empty()) follow_write(entry, depth, requests_.writes[at] != 0);
        }
        for (std::uint64_t at = begin; at < end; ++at) stack_.touch(requests_.entries[at]);
        if (end - begin > 1) check_set(event, begin, end);
    }

    // The deepest of the set is as deep as the set is large, unless an entry came twice.
    void check_set(std::size_t event, std::uint64_t begin, std::uint64_t end) {
        if (stack_.depth(requests_.entries[begin]) == end - begin) return;
        throw std::invalid_argument("event " + std::to_string(event) +
                                    " asks for an entry twice, and atomic events are sets");
    }

    // At this depth the entry has left all smaller caches: those in which it was dirty have written it back.
    void leave(EntryId entry, std::uint32_t depth) {
        std::uint32_t& clean_below = clean_below_[entry];
        if (clean_below == kClean || depth <= clean_below) return;
        ++write_backs_[clean_below];
        --write_backs_[depth];
        clean_below = depth;
    }

    void follow_write(EntryId entry, std::uint32_t depth, bool written) {
        if (depth != RecencyStack::kNever) leave(entry, depth);
        if (written) clean_below_[entry] = 1;
    }

    void leave_all() {
        if (clean_below_.empty()) return;
        for (EntryId entry = 0; entry < entry_count_; ++entry) {
            const std::uint32_t depth = stack_.depth(entry);
            if (depth != RecencyStack::kNever) leave(entry, depth);
        }
    }

    void forget() {
        leave_all();
        std::fill(found_.depths.begin(), found_.depths.end(), 0);
        std::fill(write_backs_.begin(), write_backs_.end(), 0);
        found_.requests = found_.cold = 0;
    }

    static constexpr std::uint64_t kAhead = 16;  // requests between a prefetch and its use

    const RequestColumns& requests_;
    RecencyStack stack_;
    std::uint32_t entry_count_;
    StackDistances found_;
    // By entry: it is clean in caches smaller than this, dirty in the rest; kClean: in all.
    std::vector<std::uint32_t> clean_below_;
    std::vector<std::int64_t> write_backs_;  // by capacity: how many begin to count, less those that end
};

}  // namespace

StackDistances stack_distances(const RequestColumns& requests, Contract contract,
                               std::uint64_t warmup_events) {
    const std::uint32_t entry_count = check_columns(requests);
    return StackPass(requests, entry_count).run(contract, warmup_events);
}

}  // namespace tierstore
