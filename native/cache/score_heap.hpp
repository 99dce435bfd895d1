#pragma once

#include <cstddef>
#include <vector>

#include "native/cache/policy.hpp"

namespace tierstore {

// Entries by (score, entry), the smallest at the top: a heap with four children per node, so that the compared children
// are adjacent in memory. A node may be out of date: the owner of the heap knows its entry's true score and stamp, and
// only looks at the top.
class ScoreHeap {
public:
    struct Node {
        double score;
        EntryId entry;
        std::uint32_t stamp;  // which push of the entry this was

        bool before(const Node& other) const {
            return score < other.score || (score == other.score && entry < other.entry);
        }
    };

    bool empty() const { return nodes_.empty(); }
    std::size_t size() const { return nodes_.size(); }
    const Node& top() const { return nodes_.front(); }

    void push(const Node& node) {
        nodes_.push_back(node);
        sift_up(nodes_.size() - 1, node);
    }

    void pop() {
        const Node last = nodes_.back();
        nodes_.pop_back();
        if (!nodes_.empty()) sift_down(0, last);
    }

    // The top's score has grown.
    void raise_top(double score) {
        Node top = nodes_.front();
        top.score = score;
        sift_down(0, top);
    }

    // Keeps the nodes for which `update`, which may change their scores, returns true.
    template <typename Update>
    void rebuild(Update update) {
        std::size_t kept = 0;
        for (Node& node : nodes_) {
            if (update(node)) nodes_[kept++] = node;
        }
        nodes_.resize(kept);
        for (std::size_t at = (kept + 2) / kChildren; at-- > 0;) sift_down(at, Node(nodes_[at]));
    }

private:
    static constexpr std::size_t kChildren = 4;

    void sift_up(std::size_t at, const Node& node) {
        while (at > 0) {
            const std::size_t parent = (at - 1) / kChildren;
            if (!node.before(nodes_[parent])) break;
            nodes_[at] = nodes_[parent];
            at = parent;
        }
        nodes_[at] = node;
    }

    void sift_down(std::size_t at, const Node& node) {
        const std::size_t size = nodes_.size();
        for (;;) {
            const std::size_t first = kChildren * at + 1;
            if (first >= size) break;
            std::size_t least = first;
            for (std::size_t child = first + 1; child < first + kChildren && child < size; ++child) {
                if (nodes_[child].before(nodes_[least])) least = child;
            }
            if (!nodes_[least].before(node)) break;
            nodes_[at] = nodes_[least];
            at = least;
        }
        nodes_[at] = node;
    }

    std::vector<Node> nodes_;
};

}  // namespace tierstore
