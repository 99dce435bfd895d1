// A backend of threads that each move one chunk at a time, by the method of a Mover.
#pragma once

#include <sys/types.h>

#include <memory>

#include "native/io/request_queue.hpp"

namespace tierstore {

// Called by several threads at once.
class Mover {
public:
    virtual ~Mover() = default;
    // Moves the prepared chunk, or a part of it: bytes moved, or a negative errno.
    virtual ssize_t transfer(const Chunk& chunk) = 0;
};

std::unique_ptr<Backend> make_threaded_backend(const BackendOptions& options, std::unique_ptr<Mover> mover);

// fallocate(2) of a chunk that is a punch: 0 or a negative errno.
ssize_t punch_hole(const Chunk& chunk);

}  // namespace tierstore
