#include "native/io/file.hpp"

#include <fcntl.h>
#include <linux/stat.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "native/base/align.hpp"
#include "native/base/error.hpp"

#ifndef STATX_DIOALIGN
#define STATX_DIOALIGN 0x00002000U
#endif

namespace tierstore {
namespace {

constexpr size_t kAssumedAlignment = 4096;  // where the kernel does not tell (before Linux 6.1)

int open_retrying(const std::string& path, int flags) {
    int fd;
    do {
        fd = ::open(path.c_str(), flags | O_CLOEXEC, 0644);
    } while (fd < 0 && errno == EINTR);
    return fd;
}

struct DirectAlignment {
    bool known;
    size_t memory;
    size_t offset;  // 0: the file takes no direct I/O
};

DirectAlignment ask_alignment(int fd) {
    // The raw call with a buffer of our own: a C library's struct statx may be older than the kernel's.
    alignas(8) unsigned char raw[256] = {};
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, raw) != 0) return {false, 0, 0};
    uint32_t mask, memory, offset;
    std::memcpy(&mask, raw, 4);
    std::memcpy(&memory, raw + 0x98, 4);  // stx_dio_mem_align
    std::memcpy(&offset, raw + 0x9c, 4);  // stx_dio_offset_align
    if ((mask & STATX_DIOALIGN) == 0) return {false, 0, 0};
    return {true, memory, offset};
}

}  // namespace

OpenFile::OpenFile(std::string path_, FileCreate create, DirectIo direct, FileAccess access_,
                   std::shared_ptr<Meter> meter_)
    : path(std::move(path_)), access(access_), meter(std::move(meter_)) {
    const int mode = access == FileAccess::Read ? O_RDONLY : O_RDWR;
    buffered_fd = open_retrying(path, mode | (create == FileCreate::Yes ? O_CREAT : 0));
    if (buffered_fd < 0) throw SyscallError(errno, "open", path);
    if (direct == DirectIo::Off) {
        direct_reason = "direct I/O is off";
        return;
    }
    int err = EINVAL;
    const DirectAlignment alignment = ask_alignment(buffered_fd);
    if (alignment.known && alignment.offset == 0) {
        direct_reason = "the file system has no direct I/O";
    } else {
        direct_fd = open_retrying(path, mode | O_DIRECT);
        if (direct_fd >= 0) {
            memory_alignment = alignment.known ? alignment.memory : kAssumedAlignment;
            offset_alignment = alignment.known ? alignment.offset : kAssumedAlignment;
            direct_required = direct == DirectIo::On;
            return;
        }
        err = errno;
        direct_reason = std::string("opening with O_DIRECT: ") + std::strerror(err);
    }
    if (direct == DirectIo::On) {
        ::close(buffered_fd);
        throw SyscallError(err, "open with O_DIRECT", path);
    }
}

OpenFile::~OpenFile() {
    // Errors of close() are of no use here: what must be durable was synced, and a sync tells.
    if (direct_fd >= 0) ::close(direct_fd);
    ::close(buffered_fd);
}

File::File(std::string path, FileCreate create, DirectIo direct, FileAccess access,
           std::shared_ptr<Meter> meter)
    : path_(path),
      open_(std::make_shared<const OpenFile>(std::move(path), create, direct, access, std::move(meter))) {}

OpenFilePtr File::open() const {
    std::lock_guard lock(mutex_);
    if (!open_) throw SyscallError(EBADF, "use of a closed file", path_);
    return open_;
}

void File::allocate(uint64_t offset, uint64_t nbytes) const {
    const OpenFilePtr file = open();
    const uint64_t before = size();
    int rc;
    do {
        rc = fallocate(file->buffered_fd, 0, static_cast<off_t>(offset), static_cast<off_t>(nbytes));
    } while (rc != 0 && errno == EINTR);
    if (rc == 0) return;
    const int err = errno;
    // ext4 allocates what it can before it fails: free these blocks.
    if (size() > before) (void)!ftruncate(file->buffered_fd, static_cast<off_t>(before));
    throw SyscallError(err, "fallocate of " + std::to_string(nbytes) + " bytes", path_);
}

void File::punch(uint64_t offset, uint64_t nbytes) const {
    const OpenFilePtr file = open();
    int rc;
    do {
        rc = fallocate(file->buffered_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                       static_cast<off_t>(offset), static_cast<off_t>(nbytes));
    } while (rc != 0 && errno == EINTR);
    if (rc != 0) throw SyscallError(errno, "punching a hole", path_);
}

uint64_t File::size() const {
    const OpenFilePtr file = open();
    struct stat status;
    if (fstat(file->buffered_fd, &status) != 0) throw SyscallError(errno, "fstat", path_);
    return static_cast<uint64_t>(status.st_size);
}

void File::close() {
    OpenFilePtr dropped;  // closed after the lock is gone
    std::lock_guard lock(mutex_);
    dropped.swap(open_);
}

bool File::closed() const {
    std::lock_guard lock(mutex_);
    return !open_;
}

}  // namespace tierstore
