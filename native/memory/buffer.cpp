#include "native/memory/buffer.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "native/base/align.hpp"
#include "native/memory/copy.hpp"

namespace tierstore {
namespace {

// Appends a span, or lengthens the last one where they touch.
void append(std::vector<Span>& spans, std::byte* data, size_t nbytes) {
    if (nbytes == 0) return;
    if (!spans.empty() && spans.back().data + spans.back().nbytes == data) {
        spans.back().nbytes += nbytes;
    } else {
        spans.push_back({data, nbytes});
    }
}

}  // namespace

Buffer::Buffer(std::shared_ptr<Arena> arena, const std::vector<Extent>& extents, size_t nbytes) {
    auto body = std::make_shared<Body>();
    size_t capacity = 0;
    size_t left = nbytes;
    for (const Extent& extent : extents) {
        if (extent.offset > arena->nbytes() || extent.capacity > arena->nbytes() - extent.offset)
            throw std::out_of_range("span (" + std::to_string(extent.offset) + ", " +
                                    std::to_string(extent.capacity) + ") is outside its arena of " +
                                    std::to_string(arena->nbytes()) + " bytes");
        const size_t n = std::min(left, extent.capacity);
        append(body->content, arena->data() + extent.offset, n);
        left -= n;
        capacity += extent.capacity;
    }
    if (left > 0)
        throw std::invalid_argument("spans of " + std::to_string(capacity) + " bytes cannot hold " +
                                    std::to_string(nbytes));
    body->arena = std::move(arena);
    body->extents = extents;
    body->nbytes = nbytes;
    body->capacity = capacity;
    body_ = std::move(body);
}

std::vector<Span> Buffer::room(size_t n) const {
    std::vector<Span> spans;
    spans.reserve(body_->content.size() + 1);
    for (const Extent& extent : body_->extents) {
        const size_t take = std::min(n, extent.capacity);
        append(spans, body_->arena->data() + extent.offset, take);
        n -= take;
        if (n == 0) break;
    }
    if (n > 0) throw std::invalid_argument("a buffer has no room for its padding");
    return spans;
}

void Buffer::gather(std::byte* out) const {
    const Stores stores = stores_for(nbytes());
    for (const Span& span : content()) {
        copy_bytes(out, span.data, span.nbytes, stores);
        out += span.nbytes;
    }
}

void Buffer::scatter(const std::byte* in) const {
    const Stores stores = stores_for(nbytes());
    for (const Span& span : content()) {
        copy_bytes(span.data, in, span.nbytes, stores);
        in += span.nbytes;
    }
}

void Buffer::zero_padding(size_t n) const {
    size_t at = 0;
    for (const Extent& extent : body_->extents) {
        const size_t begin = std::max(at, body_->nbytes);
        const size_t end = std::min(at + extent.capacity, n);
        if (begin < end) std::memset(body_->arena->data() + extent.offset + (begin - at), 0, end - begin);
        at += extent.capacity;
        if (at >= n) break;
    }
}

bool Buffer::divides(size_t unit) const {
    const auto spans = content();
    for (size_t i = 0; i < spans.size(); ++i) {
        if (!is_aligned(spans[i].data, unit)) return false;
        if (i + 1 < spans.size() && spans[i].nbytes % unit != 0) return false;
    }
    return true;
}

}  // namespace tierstore
