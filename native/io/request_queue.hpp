// What all backends share: the order in which requests are cut into chunks, and how a chunk continues after a transfer.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "native/io/backend.hpp"

namespace tierstore {

// The position of a byte in a request's parts.
struct PartCursor {
    size_t part = 0;
    size_t within = 0;
};

// A request that a backend has accepted.
struct ActiveRequest {
    IoRequest request;
    PartCursor cursor;       // of the next chunk
    size_t issued = 0;       // bytes handed out in chunks
    bool exhausted = false;  // no more chunks: all handed out, or failed
    size_t in_flight = 0;    // chunks
    FailurePtr failure;
    uint64_t started_ns = 0;
    uint64_t continued = 0;
};

enum class Progress { Done, Again, Failed };

// One piece of a request, driven by system calls until it is completely transferred.
class Chunk {
public:
    Chunk(std::shared_ptr<ActiveRequest> owner, size_t begin, size_t nbytes, PartCursor cursor);

    // Whether it moves memory: a sync or a punch is one call that does not.
    bool transfers() const { return kind() == IoKind::Read || kind() == IoKind::Write; }
    // Chooses the descriptor and the vector of the next transfer.
    void prepare();
    // Takes the transfer's result: bytes, or a negative errno.
    Progress advance(ssize_t result);

    IoKind kind() const { return owner_->request.kind; }
    const OpenFile& file() const { return *owner_->request.file; }
    int fd() const { return fd_; }
    uint64_t offset() const { return owner_->request.offset + begin_ + done_; }
    uint64_t hole_bytes() const { return owner_->request.hole_bytes; }
    const std::vector<iovec>& vector() const { return vector_; }
    const FailurePtr& failure() const { return failure_; }
    const std::shared_ptr<ActiveRequest>& owner() const { return owner_; }
    uint64_t continued() const { return continued_; }
    // Set when the last result was EAGAIN: yield before trying again.
    bool must_pause() const { return pauses_ > 0; }

private:
    size_t gather(size_t limit, size_t memory_alignment, size_t length_alignment);
    Progress fail(int err, const std::string& what);

    std::shared_ptr<ActiveRequest> owner_;
    size_t begin_;
    size_t nbytes_;
    size_t done_ = 0;
    PartCursor cursor_;
    int fd_ = -1;
    bool direct_ = false;
    bool direct_refused_ = false;
    size_t asked_ = 0;
    unsigned pauses_ = 0;
    uint64_t continued_ = 0;
    std::vector<iovec> vector_;
    FailurePtr failure_;
};

// Not thread-safe: a backend's mutex guards it.
class RequestQueue {
public:
    explicit RequestQueue(size_t chunk_bytes);

    void push(IoRequest request);
    bool cancel(uint64_t id);
    void promote(uint64_t id);

    // The next chunk to start, or null. Demanded requests first, then the others in order of arrival; the chunks of one
    // request in order of offset.
    std::unique_ptr<Chunk> next();
    // Ends a chunk. Returns its request if that is complete: the caller must call its `complete` with result().
    std::shared_ptr<ActiveRequest> retire(const Chunk& chunk);

    // Whether next() may return a chunk.
    bool pending() const { return !demanded_.empty() || !others_.empty(); }
    size_t active() const { return active_; }  // requests pushed and not complete

private:
    using Queue = std::deque<std::shared_ptr<ActiveRequest>>;

    std::unique_ptr<Chunk> next_of(Queue& queue);

    size_t chunk_bytes_;
    size_t active_ = 0;
    Queue demanded_;
    Queue others_;
};

IoResult result(const ActiveRequest& request);

}  // namespace tierstore
