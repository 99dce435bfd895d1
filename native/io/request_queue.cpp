#include "native/io/request_queue.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

#include "native/base/align.hpp"

namespace tierstore {
namespace {

constexpr size_t kVectorLimit = 1024;    // IOV_MAX of Linux
constexpr unsigned kPauseLimit = 10000;  // EAGAIN in a row before it is an error

void move_on(PartCursor& cursor, const std::vector<iovec>& parts, size_t nbytes) {
    while (nbytes > 0) {
        const size_t here = std::min(nbytes, parts[cursor.part].iov_len - cursor.within);
        cursor.within += here;
        nbytes -= here;
        if (cursor.within == parts[cursor.part].iov_len) {
            ++cursor.part;
            cursor.within = 0;
        }
    }
}

const char* name(IoKind kind) {
    switch (kind) {
        case IoKind::Read: return "read";
        case IoKind::Write: return "write";
        case IoKind::Punch: return "punching a hole";
        default: return "fdatasync";
    }
}

}  // namespace

uint64_t monotonic_ns() {
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                     std::chrono::steady_clock::now().time_since_epoch())
                                     .count());
}

Chunk::Chunk(std::shared_ptr<ActiveRequest> owner, size_t begin, size_t nbytes, PartCursor cursor)
    : owner_(std::move(owner)), begin_(begin), nbytes_(nbytes), cursor_(cursor) {
    if (!transfers()) fd_ = owner_->request.file->buffered_fd;
}

size_t Chunk::gather(size_t limit, size_t memory_alignment, size_t length_alignment) {
    vector_.clear();
    const auto& parts = owner_->request.parts;
    size_t total = 0;
    PartCursor at = cursor_;
    while (total < limit && vector_.size() < kVectorLimit) {
        auto* base = static_cast<std::byte*>(parts[at.part].iov_base) + at.within;
        const size_t n = std::min(parts[at.part].iov_len - at.within, limit - total);
        const size_t usable = round_down(n, length_alignment);
        if (!is_aligned(base, memory_alignment) || usable == 0) break;
        vector_.push_back({base, usable});
        total += usable;
        if (usable < n) break;
        ++at.part;
        at.within = 0;
    }
    return total;
}

void Chunk::prepare() {
    const OpenFile& file = *owner_->request.file;
    const size_t left = nbytes_ - done_;
    direct_ = false;
    // Whether it can go past the page cache is derived again at each turn: a short transfer may have ended
    // anywhere.
    if (file.direct_fd >= 0 && !direct_refused_ && is_aligned(offset(), file.offset_alignment)) {
        asked_ =
            gather(round_down(left, file.offset_alignment), file.memory_alignment, file.offset_alignment);
        if (asked_ > 0) {
            direct_ = true;
            fd_ = file.direct_fd;
            return;
        }
    }
    size_t limit = left;
    if (file.direct_fd >= 0 && !direct_refused_) {
        // An unaligned head, tail or piece of memory: through the page cache, up to where direct I/O may go
        // on.
        const uint64_t next = round_down(offset(), file.offset_alignment) + file.offset_alignment;
        limit = std::min<uint64_t>(left, next - offset());
    }
    asked_ = gather(limit, 1, 1);
    fd_ = file.buffered_fd;
}

Progress Chunk::fail(int err, const std::string& what) {
    SyscallError error(err, what, owner_->request.file->path);
    if (kind() != IoKind::Sync) error.file_offset = static_cast<int64_t>(offset());
    failure_ = make_failure(std::move(error));
    return Progress::Failed;
}

Progress Chunk::advance(ssize_t result) {
    if (result == -EINTR) return Progress::Again;
    if (result == -EAGAIN) {
        if (++pauses_ < kPauseLimit) return Progress::Again;
        return fail(EAGAIN, name(kind()));
    }
    pauses_ = 0;
    if (!transfers()) return result < 0 ? fail(static_cast<int>(-result), name(kind())) : Progress::Done;
    const std::string where = std::string(name(kind())) + " at offset " + std::to_string(offset());
    if (result == -EINVAL && direct_ && !owner_->request.file->direct_required) {
        direct_refused_ = true;  // the file system's alignment is not what it said: buffered from here on
        return Progress::Again;
    }
    if (result < 0) return fail(static_cast<int>(-result), where);
    if (result == 0) {
        return kind() == IoKind::Read ? fail(EIO, where + ": unexpected end of file")
                                      : fail(EIO, where + ": nothing was written");
    }
    const auto moved = static_cast<size_t>(result);
    if (moved > asked_) return fail(EIO, where + ": more bytes than asked for");
    if (moved < asked_) ++continued_;
    done_ += moved;
    if (done_ == nbytes_) return Progress::Done;
    move_on(cursor_, owner_->request.parts, moved);
    return Progress::Again;
}

RequestQueue::RequestQueue(size_t chunk_bytes) : chunk_bytes_(chunk_bytes) {
    if (chunk_bytes == 0 || !is_aligned(chunk_bytes, kPageBytes))
        throw std::invalid_argument("chunk_bytes must be a multiple of 4096");
}

void RequestQueue::push(IoRequest request) {
    auto active = std::make_shared<ActiveRequest>();
    auto& queue = request.priority == Priority::Demand ? demanded_ : others_;
    active->request = std::move(request);
    queue.push_back(std::move(active));
    ++active_;
}

bool RequestQueue::cancel(uint64_t id) {
    for (Queue* queue : {&demanded_, &others_}) {
        const auto it =
            std::find_if(queue->begin(), queue->end(), [&](auto& r) { return r->request.id == id; });
        if (it == queue->end()) continue;
        if ((*it)->started_ns != 0) return false;
        queue->erase(it);
        --active_;
        return true;
    }
    return false;
}

void RequestQueue::promote(uint64_t id) {
    const auto it =
        std::find_if(others_.begin(), others_.end(), [&](auto& r) { return r->request.id == id; });
    if (it == others_.end()) return;
    demanded_.push_back(std::move(*it));
    others_.erase(it);
}

std::unique_ptr<Chunk> RequestQueue::next() {
    auto chunk = next_of(demanded_);
    return chunk ? std::move(chunk) : next_of(others_);
}

std::unique_ptr<Chunk> RequestQueue::next_of(Queue& queue) {
    while (!queue.empty() && queue.front()->exhausted) queue.pop_front();  // failed before all was handed out
    if (queue.empty()) return nullptr;
    const auto active = queue.front();
    const IoRequest& request = active->request;
    const size_t nbytes = std::min(chunk_bytes_, request.nbytes - active->issued);
    auto chunk = std::make_unique<Chunk>(active, active->issued, nbytes, active->cursor);
    if (active->started_ns == 0) active->started_ns = monotonic_ns();
    move_on(active->cursor, request.parts, nbytes);
    active->issued += nbytes;
    ++active->in_flight;
    if (active->issued == request.nbytes) {
        active->exhausted = true;
        queue.pop_front();
    }
    return chunk;
}

std::shared_ptr<ActiveRequest> RequestQueue::retire(const Chunk& chunk) {
    const auto& active = chunk.owner();
    --active->in_flight;
    active->continued += chunk.continued();
    if (chunk.failure() && !active->failure) {
        active->failure = chunk.failure();
        active->exhausted = true;
    }
    if (!active->exhausted || active->in_flight > 0) return nullptr;
    --active_;
    return active;
}

IoResult result(const ActiveRequest& request) {
    return {request.failure, monotonic_ns() - request.started_ns, request.continued};
}

}  // namespace tierstore
