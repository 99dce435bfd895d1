// A logical run of bytes over one or more pieces of an arena.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "native/memory/arena.hpp"

namespace tierstore {

struct Span {
    std::byte* data;
    size_t nbytes;
};

// A cheap handle (one reference count) on an immutable list of spans. The first `nbytes` bytes of the spans, in order,
// are the content; further capacity is room for the padding that direct I/O needs.
class Buffer {
public:
    struct Extent {
        size_t offset;  // within the arena
        size_t capacity;
    };

    Buffer(std::shared_ptr<Arena> arena, const std::vector<Extent>& extents, size_t nbytes);

    size_t nbytes() const { return body_->nbytes; }
    size_t capacity() const { return body_->capacity; }
    bool contiguous() const { return body_->content.size() <= 1; }
    const std::vector<Extent>& extents() const { return body_->extents; }
    const std::shared_ptr<Arena>& arena() const { return body_->arena; }

    // The content, with adjacent spans merged: `nbytes` bytes in total.
    std::span<const Span> content() const { return body_->content; }
    // The first `n` bytes of the room, padding included; n is at most the capacity.
    std::vector<Span> room(size_t n) const;

    // Copies the content to, or from, `nbytes` bytes of ordinary memory.
    void gather(std::byte* out) const;
    void scatter(const std::byte* in) const;
    // Zeroes the room from the end of the content to byte `n`.
    void zero_padding(size_t n) const;

    // Whether every span but the last ends on a multiple of `unit` bytes and starts at one in memory.
    bool divides(size_t unit) const;

private:
    struct Body {
        std::shared_ptr<Arena> arena;
        std::vector<Extent> extents;
        std::vector<Span> content;
        size_t nbytes;
        size_t capacity;
    };
    std::shared_ptr<const Body> body_;
};

}  // namespace tierstore
