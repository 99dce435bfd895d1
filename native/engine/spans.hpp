// When operations ran: the last ones, for a timeline.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace tierstore {

enum class Activity { Other, Read, Write, Sync, Punch, Copy, FillZero, Accumulate, SumOfSquares, AdamW };

// What an operation does, and with how many bytes.
struct Label {
    Activity activity = Activity::Other;
    size_t nbytes = 0;
};

struct OperationSpan {
    Label label;
    bool held = false;  // the turn on a limited link, not the operation's own time
    uint64_t ticket = 0;
    uint64_t start_ns = 0;  // of CLOCK_MONOTONIC
    uint64_t end_ns = 0;
};

// A ring: spans that are not drained in time are overwritten, and counted. Not thread-safe.
class SpanRing {
public:
    // Drops its content; 0 switches it off.
    void resize(size_t capacity) {
        spans_.clear();
        spans_.reserve(capacity);
        capacity_ = capacity;
        next_ = 0;
    }

    bool on() const { return capacity_ > 0; }

    void add(const OperationSpan& span) {
        if (capacity_ == 0) return;
        if (spans_.size() < capacity_) {
            spans_.push_back(span);
            return;
        }
        spans_[next_] = span;
        next_ = (next_ + 1) % capacity_;
        ++overwritten_;
    }

    // The spans in the order in which they were added, and how many were overwritten; that count starts again.
    std::pair<std::vector<OperationSpan>, uint64_t> drain() {
        std::vector<OperationSpan> out(spans_.begin() + static_cast<std::ptrdiff_t>(next_), spans_.end());
        out.insert(out.end(), spans_.begin(), spans_.begin() + static_cast<std::ptrdiff_t>(next_));
        spans_.clear();
        next_ = 0;
        return {std::move(out), std::exchange(overwritten_, 0)};
    }

private:
    std::vector<OperationSpan> spans_;
    size_t capacity_ = 0;
    size_t next_ = 0;  // in a full ring: the oldest
    uint64_t overwritten_ = 0;
};

}  // namespace tierstore
