// Several ordered lists of entries that share one pair of links per entry: an entry is in at most one of them.
#pragma once

#include <cstdint>
#include <vector>

#include "native/cache/policy.hpp"

namespace tierstore {

// Lists are numbered from 1; kNone means that an entry is in no list. Each list is ordered from oldest to newest and
// knows the frames of its entries.
class EntryLists {
public:
    using List = std::uint8_t;
    static constexpr List kNone = 0;
    static constexpr EntryId kEnd = ~0u;

    explicit EntryLists(List lists);

    // Adds an entry, in no list yet, with its size.
    void add(EntryId entry, std::uint32_t frames);

    List list_of(EntryId entry) const { return nodes_[entry].list; }
    std::uint32_t frames_of(EntryId entry) const { return nodes_[entry].frames; }
    std::uint64_t frames(List list) const { return ends_[list].frames; }
    bool empty(List list) const { return ends_[list].oldest == kEnd; }

    EntryId oldest(List list) const { return ends_[list].oldest; }
    EntryId newer(EntryId entry) const { return nodes_[entry].newer; }

    void push_newest(List list, EntryId entry) {
        Node& node = nodes_[entry];
        Ends& ends = ends_[list];
        node.list = list;
        node.older = ends.newest;
        node.newer = kEnd;
        (ends.newest == kEnd ? ends.oldest : nodes_[ends.newest].newer) = entry;
        ends.newest = entry;
        ends.frames += node.frames;
    }
    // Removes it from its list; does nothing if it is in none.
    void take(EntryId entry) {
        Node& node = nodes_[entry];
        if (node.list == kNone) return;
        Ends& ends = ends_[node.list];
        (node.older == kEnd ? ends.oldest : nodes_[node.older].newer) = node.newer;
        (node.newer == kEnd ? ends.newest : nodes_[node.newer].older) = node.older;
        ends.frames -= node.frames;
        node.list = kNone;
    }
    void move_newest(List list, EntryId entry) {
        take(entry);
        push_newest(list, entry);
    }
    EntryId take_oldest(List list) {
        const EntryId entry = oldest(list);
        take(entry);
        return entry;
    }

    void prefetch(EntryId entry) const { __builtin_prefetch(&nodes_[entry], 1); }

private:
    struct Node {
        EntryId older = kEnd;
        EntryId newer = kEnd;
        std::uint32_t frames = 0;
        List list = kNone;
    };
    struct Ends {
        EntryId oldest = kEnd;
        EntryId newest = kEnd;
        std::uint64_t frames = 0;
    };

    std::vector<Ends> ends_;
    std::vector<Node> nodes_;
};

}  // namespace tierstore
