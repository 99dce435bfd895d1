#include "native/io/ring.hpp"

#ifdef TIERSTORE_HAS_URING

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "native/base/error.hpp"

namespace tierstore {
namespace {

unsigned load(const unsigned* index) { return __atomic_load_n(index, __ATOMIC_ACQUIRE); }
void store(unsigned* index, unsigned value) { __atomic_store_n(index, value, __ATOMIC_RELEASE); }

// Completions are then handled when the one thread asks for them, not by interrupting it (Linux 6.1). The
// ring starts disabled: it belongs to the thread that enables it.
constexpr unsigned kBestFlags =
#if defined(IORING_SETUP_SINGLE_ISSUER) && defined(IORING_SETUP_DEFER_TASKRUN)
    IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_R_DISABLED;
#else
    0;
#endif

int setup(unsigned entries, io_uring_params& params) {
    return static_cast<int>(syscall(SYS_io_uring_setup, entries, &params));
}

}  // namespace

Ring::Ring(unsigned entries) {
    io_uring_params params{};
    params.flags = kBestFlags;
    fd_ = setup(entries, params);
    disabled_ = fd_ >= 0 && kBestFlags != 0;
    if (fd_ < 0 && errno == EINVAL && kBestFlags != 0) {
        params = {};
        fd_ = setup(entries, params);
    }
    if (fd_ < 0) throw SyscallError(errno, "io_uring_setup");
    const bool usable = (params.features & IORING_FEAT_SINGLE_MMAP) && (params.features & IORING_FEAT_NODROP);
    if (!usable) {
        ::close(fd_);
        throw SyscallError(ENOSYS, "io_uring_setup, a kernel before 5.5");
    }
    rings_bytes_ = std::max<size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                                    params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    sqes_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    constexpr int kProtection = PROT_READ | PROT_WRITE, kFlags = MAP_SHARED | MAP_POPULATE;
    void* rings = mmap(nullptr, rings_bytes_, kProtection, kFlags, fd_, IORING_OFF_SQ_RING);
    void* sqes = mmap(nullptr, sqes_bytes_, kProtection, kFlags, fd_, IORING_OFF_SQES);
    const int err = errno;
    rings_ = rings == MAP_FAILED ? nullptr : static_cast<std::byte*>(rings);
    sqes_ = sqes == MAP_FAILED ? nullptr : static_cast<io_uring_sqe*>(sqes);
    if (!rings_ || !sqes_) {
        unmap();
        throw SyscallError(err, "mapping an io_uring");
    }
    const auto index = [this](unsigned offset) { return reinterpret_cast<unsigned*>(rings_ + offset); };
    sq_head_ = index(params.sq_off.head);
    sq_tail_ = index(params.sq_off.tail);
    sq_array_ = index(params.sq_off.array);
    sq_mask_ = *index(params.sq_off.ring_mask);
    tail_ = *sq_tail_;
    cq_head_ = index(params.cq_off.head);
    cq_tail_ = index(params.cq_off.tail);
    cqes_ = reinterpret_cast<io_uring_cqe*>(rings_ + params.cq_off.cqes);
    cq_mask_ = *index(params.cq_off.ring_mask);
}

Ring::~Ring() { unmap(); }

void Ring::unmap() {
    if (rings_) munmap(rings_, rings_bytes_);
    if (sqes_) munmap(sqes_, sqes_bytes_);
    ::close(fd_);
}

void Ring::hold(const std::vector<int>& fds) {
    if (syscall(SYS_io_uring_register, fd_, IORING_REGISTER_FILES, fds.data(), fds.size()) != 0)
        throw SyscallError(errno, "registering the locks of the store in the io_uring");
    holding_ = true;
}

void Ring::let_go() {
    if (holding_) syscall(SYS_io_uring_register, fd_, IORING_UNREGISTER_FILES, nullptr, 0);
    holding_ = false;
}

void Ring::enable() {
    if (disabled_ && syscall(SYS_io_uring_register, fd_, IORING_REGISTER_ENABLE_RINGS, nullptr, 0) != 0)
        throw SyscallError(errno, "enabling the io_uring");
}

void Ring::require(std::initializer_list<unsigned> opcodes) {
    constexpr unsigned kMost = 256;
    std::vector<std::byte> raw(sizeof(io_uring_probe) + kMost * sizeof(io_uring_probe_op));
    if (syscall(SYS_io_uring_register, fd_, IORING_REGISTER_PROBE, raw.data(), kMost) != 0) {
        if (errno != EINVAL) throw SyscallError(errno, "asking the io_uring for its operations");
        return;
    }
    const auto* known = reinterpret_cast<const io_uring_probe*>(raw.data());
    for (const unsigned opcode : opcodes)
        if (opcode >= known->ops_len || !(known->ops[opcode].flags & IO_URING_OP_SUPPORTED))
            throw SyscallError(ENOSYS, "io_uring, operation " + std::to_string(opcode));
}

io_uring_sqe& Ring::prepare() {
    const unsigned slot = tail_++ & sq_mask_;
    sq_array_[slot] = slot;
    io_uring_sqe& sqe = sqes_[slot];
    std::memset(&sqe, 0, sizeof sqe);
    return sqe;
}

void Ring::enter() {
    store(sq_tail_, tail_);
    for (;;) {
        const unsigned unsubmitted = tail_ - load(sq_head_);
        if (unsubmitted == 0 && load(cq_tail_) != *cq_head_) return;
        const long n = syscall(SYS_io_uring_enter, fd_, unsubmitted, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
        if (n >= 0 && static_cast<unsigned>(n) == unsubmitted) return;
        // Interrupted, or the kernel is short of something for now: reap what there is, the rest goes next
        // time.
        if (n >= 0 || errno == EINTR || errno == EAGAIN || errno == EBUSY || errno == ENOMEM) {
            if (load(cq_tail_) != *cq_head_) return;
            if (n < 0 && errno != EINTR) usleep(1000);
            continue;
        }
        throw SyscallError(errno, "io_uring_enter");
    }
}

void Ring::reap(std::vector<Completion>& out) {
    unsigned head = *cq_head_;
    const unsigned tail = load(cq_tail_);
    for (; head != tail; ++head) {
        const io_uring_cqe& cqe = cqes_[head & cq_mask_];
        out.push_back({cqe.user_data, cqe.res});
    }
    store(cq_head_, head);
}

}  // namespace tierstore

#endif
