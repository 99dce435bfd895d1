#include "native/cache/entry_lists.hpp"

namespace tierstore {

EntryLists::EntryLists(List lists) : ends_(lists + 1u) {}

void EntryLists::add(EntryId entry, std::uint32_t frames) {
    if (entry >= nodes_.size()) nodes_.resize(entry + 1);
    nodes_[entry].frames = frames;
}

void EntryLists::push_newest(List list, EntryId entry) {
    Node& node = nodes_[entry];
    Ends& ends = ends_[list];
    node.list = list;
    node.older = ends.newest;
    node.newer = kEnd;
    (ends.newest == kEnd ? ends.oldest : nodes_[ends.newest].newer) = entry;
    ends.newest = entry;
    ends.frames += node.frames;
}

void EntryLists::take(EntryId entry) {
    Node& node = nodes_[entry];
    if (node.list == kNone) return;
    Ends& ends = ends_[node.list];
    (node.older == kEnd ? ends.oldest : nodes_[node.older].newer) = node.newer;
    (node.newer == kEnd ? ends.newest : nodes_[node.newer].older) = node.older;
    ends.frames -= node.frames;
    node.list = kNone;
}

}  // namespace tierstore
