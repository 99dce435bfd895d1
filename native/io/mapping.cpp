#include "native/io/mapping.hpp"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "native/base/align.hpp"
#include "native/base/error.hpp"
#include "native/memory/persist.hpp"

#ifndef MADV_POPULATE_READ  // since Linux 5.14; a C library may be older
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace tierstore {

Mapped::Mapped(int fd, const std::string& path, size_t nbytes, MapSync wanted, FileAccess access)
    : size_(nbytes) {
    const int protection = access == FileAccess::Read ? PROT_READ : PROT_READ | PROT_WRITE;
    void* at = MAP_FAILED;
    if (wanted != MapSync::Off && !can_persist()) {
        if (wanted == MapSync::On) throw SyscallError(ENOTSUP, "mmap with MAP_SYNC", path);
        reason_ = "this processor's cache lines cannot be written back by user code";
    } else if (wanted != MapSync::Off) {
        at = mmap(nullptr, nbytes, protection, MAP_SHARED_VALIDATE | MAP_SYNC, fd, 0);
        if (at == MAP_FAILED) {
            const int err = errno;
            if (wanted == MapSync::On) throw SyscallError(err, "mmap with MAP_SYNC", path);
            reason_ = err == EOPNOTSUPP ? "the file system is not DAX" : std::strerror(err);
        }
    } else {
        reason_ = "MAP_SYNC is off";
    }
    if (at == MAP_FAILED) {
        at = mmap(nullptr, nbytes, protection, MAP_SHARED, fd, 0);
        if (at == MAP_FAILED) throw SyscallError(errno, "mmap of " + std::to_string(nbytes) + " bytes", path);
    }
    data_ = static_cast<std::byte*>(at);
}

Mapped::~Mapped() { munmap(data_, size_); }

int Mapped::sync(int fd, bool grown) const {
    // With MAP_SYNC the stores were flushed as they were made, and a fault made the block that it maps durable;
    // the file's length is not the mapping's.
    if (!synchronous() && msync(data_, size_, MS_SYNC) != 0) return errno;
    if (grown && fdatasync(fd) != 0) return errno;
    return 0;
}

int populate_pages(const std::byte* at, size_t nbytes, Touch touch) {
    const auto begin = round_down(reinterpret_cast<uintptr_t>(at), kPageBytes);
    const auto end = round_up(reinterpret_cast<uintptr_t>(at) + nbytes, kPageBytes);
    const int advice = touch == Touch::Read ? MADV_POPULATE_READ : MADV_POPULATE_WRITE;
    int rc;
    do {
        rc = madvise(reinterpret_cast<void*>(begin), end - begin, advice);
    } while (rc != 0 && (errno == EINTR || errno == EAGAIN));
    if (rc == 0 || errno == EINVAL) return 0;
    return errno == EFAULT || errno == EHWPOISON ? EIO : errno;
}

MappedPtr FileMapping::covering(int fd, const std::string& path, uint64_t end, MapSync wanted,
                                FileAccess access) {
    std::lock_guard lock(mutex_);
    if (mapped_ && mapped_->size() >= end) return mapped_;
    struct stat status;
    if (fstat(fd, &status) != 0) throw SyscallError(errno, "fstat", path);
    const auto size = static_cast<uint64_t>(status.st_size);
    if (size < end || size == 0) return nullptr;
    mapped_ = std::make_shared<const Mapped>(fd, path, size, wanted, access);
    grown_ = true;
    return mapped_;
}

MappedPtr FileMapping::for_sync(bool& grown) {
    std::lock_guard lock(mutex_);
    grown = std::exchange(grown_, false);
    return mapped_;
}

}  // namespace tierstore
