#pragma once

#include <cstdint>
#include <vector>

#include "native/cache/policy.hpp"

namespace tierstore {

// Entries from oldest to newest, kept as a log with holes instead of a linked list: renewing an entry is one random
// write and one sequential one, where a list touches the entry and four neighbours. When the log is full, the holes
// are squeezed out; it has room for several times its live entries, so that is rare.
class EntryQueue {
public:
    using Position = std::uint32_t;

    void push(EntryId entry) {  // as the newest; it must not be in the queue
        if (entry >= where_.size()) where_.resize(entry + entry / 2 + 1, kNowhere);
        ++live_;
        append(entry);
    }
    void renew(EntryId entry) { append(entry); }  // becomes the newest; it must be in the queue
    void erase(EntryId entry) {
        where_[entry] = kNowhere;
        --live_;
    }
    std::uint32_t size() const { return live_; }
    // Appends the oldest evictable entries until their frames sum to `frames`; returns the sum.
    std::uint64_t oldest(const Candidates& candidates, std::uint64_t frames, std::vector<EntryId>& victims);

    // for (auto at = q.first(); at != q.end(); at = q.after(at)) q[at]: oldest to newest. push() and renew() move
    // positions, except the hand; a hand on an erased entry moves to the next newer one.
    Position first() {
        first_ = settle(first_);
        return first_;
    }
    Position end() const { return end_; }
    Position after(Position at) const { return settle(at + 1); }
    EntryId operator[](Position at) const { return log_[at]; }
    Position hand() {
        hand_ = settle(hand_);
        return hand_;
    }
    void set_hand(Position at) { hand_ = at; }

    void prefetch(EntryId entry) const {
        if (entry < where_.size()) __builtin_prefetch(&where_[entry], 1);
    }

private:
    static constexpr Position kNowhere = ~0u;
    static constexpr std::uint32_t kSpread = 4;  // length of a new log, relative to its live entries

    void append(EntryId entry) {
        if (end_ == log_.size()) squeeze();
        where_[entry] = end_;
        log_[end_++] = entry;
    }
    Position settle(Position at) const {
        while (at != end_ && where_[log_[at]] != at) ++at;
        return at;
    }
    void squeeze();

    std::vector<EntryId> log_;
    std::vector<Position> where_;  // by entry: its position in the log; any other mention is a hole
    Position first_ = 0;           // no live entry is before
    Position end_ = 0;
    Position hand_ = 0;
    std::uint32_t live_ = 0;
};

}  // namespace tierstore
