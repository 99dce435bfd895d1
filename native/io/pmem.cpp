// The backend for persistent memory: see make_pmem_backend.
#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "native/base/align.hpp"
#include "native/io/threads.hpp"
#include "native/memory/copy.hpp"
#include "native/memory/persist.hpp"

#ifndef MADV_POPULATE_READ  // since Linux 5.14; a C library may be older
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

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

    // Touches the pages of a transfer beforehand, where a drive's error or a file that was cut short is an errno; met by
    // a copy it would be a SIGBUS. False with errno set. (Kernels before 5.14 cannot: there it stays a signal.)
    static bool populate(std::byte* at, size_t nbytes, int advice) {
        const auto begin = round_down(reinterpret_cast<uintptr_t>(at), kPageBytes);
        const auto end = round_up(reinterpret_cast<uintptr_t>(at) + nbytes, kPageBytes);
        int rc;
        do {
            rc = madvise(reinterpret_cast<void*>(begin), end - begin, advice);
        } while (rc != 0 && (errno == EINTR || errno == EAGAIN));
        if (rc == 0 || errno == EINVAL) return true;
        if (errno == EFAULT || errno == EHWPOISON) errno = EIO;
        return false;
    }

    ssize_t read(const Chunk& chunk) const {
        const MappedPtr mapped = map(chunk.file(), chunk.offset() + asked(chunk));
        if (!mapped) return 0;  // the end of the file lies before
        std::byte* at = mapped->data() + chunk.offset();
        if (!populate(at, asked(chunk), MADV_POPULATE_READ)) return -errno;
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
        // A store to a page without a block would be a SIGBUS where the file system is full; most have theirs, and
        // then this is one short system call.
        if (fallocate(file.buffered_fd, 0, static_cast<off_t>(chunk.offset()), static_cast<off_t>(nbytes)) !=
            0)
            return -errno;
        const MappedPtr mapped = map(file, chunk.offset() + nbytes);
        if (!mapped) return -EIO;  // cut short by somebody else
        std::byte* at = mapped->data() + chunk.offset();
        if (!populate(at, nbytes, MADV_POPULATE_WRITE)) return -errno;
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
