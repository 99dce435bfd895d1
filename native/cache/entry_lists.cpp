#include "native/cache/entry_lists.hpp"

namespace tierstore {

EntryLists::EntryLists(List lists) : ends_(lists + 1u) {}

void EntryLists::add(EntryId entry, std::uint32_t frames) {
    if (entry >= nodes_.size()) nodes_.resize(entry + 1);
    nodes_[entry].frames = frames;
}

}  // namespace tierstore
