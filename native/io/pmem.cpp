// The backend for persistent memory: see make_pmem_backend.
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "native/io/threads.hpp"
#include "native/memory/copy.hpp"
#include "native/memory/persist.hpp"

namespace tierstore {
namespace {

class Mappings final : public Mover {
public:
    explicit Mappings(MapSync wanted) : wanted_(wanted) {}

    ssize_t transfer(const Chunk& chunk) override {
        try {
            switch (chunk.kind()) {
                case IoKind::Sync: return sync(chunk.file());
                case IoKind::Punch: return punch_hole(chunk);
                case IoKind::Read: return read(chunk);
                default: return write(chunk);
            }
        } catch (const SyscallError& error) {
            return -error.err;
        }
    }

private:
    static size_t asked(const Chunk& chunk) {
        size_t sum = 0;
        for (const iovec& part : chunk.vector()) sum += part.iov_len;
        return sum;
    }

    MappedPtr map(const OpenFile& file, uint64_t end) const {
        return file.mapping.covering(file.buffered_fd, file.path, end, wanted_, file.access);
    }

    ssize_t read(const Chunk& chunk) const {
        const MappedPtr mapped = map(chunk.file(), chunk.offset() + asked(chunk));
        if (!mapped) return 0;  // beyond the end of the file
        std::byte* at = mapped->data() + chunk.offset();
        if (const int err = populate_pages(at, asked(chunk), Touch::Read)) return -err;
        size_t moved = 0;
        for (const iovec& part : chunk.vector()) {
            copy_bytes(part.iov_base, at + moved, part.iov_len, stores_for(part.iov_len));
            moved += part.iov_len;
        }
        return static_cast<ssize_t>(moved);
    }

    ssize_t write(const Chunk& chunk) const {
        const OpenFile& file = chunk.file();
        const size_t nbytes = asked(chunk);
        // On a full file system a store to a page without a block would be a SIGBUS: reserve the blocks first. Most
        // pages have theirs, and then this is one short system call.
        if (fallocate(file.buffered_fd, 0, static_cast<off_t>(chunk.offset()), static_cast<off_t>(nbytes)) !=
            0)
            return -errno;
        const MappedPtr mapped = map(file, chunk.offset() + nbytes);
        if (!mapped) return -EIO;  // truncated by another process
        std::byte* at = mapped->data() + chunk.offset();
        if (const int err = populate_pages(at, nbytes, Touch::Write)) return -err;
        size_t moved = 0;
        for (const iovec& part : chunk.vector()) {
            if (mapped->synchronous()) {
                persist_bytes(at + moved, part.iov_base, part.iov_len);
            } else {
                std::memcpy(at + moved, part.iov_base, part.iov_len);
            }
            moved += part.iov_len;
        }
        return static_cast<ssize_t>(moved);
    }

    static ssize_t sync(const OpenFile& file) {
        bool grown = false;
        const MappedPtr mapped = file.mapping.for_sync(grown);
        if (mapped) return -mapped->sync(file.buffered_fd, grown);
        // Nothing was written through the mapping; what else changed (its length, say) is the kernel's to sync.
        return fdatasync(file.buffered_fd) == 0 ? 0 : -errno;
    }

    const MapSync wanted_;
};

}  // namespace

std::unique_ptr<Backend> make_pmem_backend(const BackendOptions& options) {
    return make_threaded_backend(options, std::make_unique<Mappings>(options.map_sync));
}

}  // namespace tierstore
