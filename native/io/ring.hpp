// One io_uring through raw system calls. Compiled only if the kernel's header is available.
#pragma once

#if __has_include(<linux/io_uring.h>)
#define TIERSTORE_HAS_URING 1

#include <linux/io_uring.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

namespace tierstore {

struct Completion {
    uint64_t user_data;
    int result;  // of the system call, or a negative errno
};

// Created on any thread; enable() and everything below it are called by one thread only, so that only this thread
// touches the queues' indices on our side. The kernel is the other side: hence acquire and release on its indices.
class Ring {
public:
    // Throws SyscallError.
    explicit Ring(unsigned entries);
    ~Ring();
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    // The ring holds the open files behind `fds` until its last operation has ended, even if the process dies. Called
    // once.
    void hold(const std::vector<int>& fds);

    // Releases those files now, with nothing in flight. Destroying a ring does so too, but the kernel takes its time.
    void let_go();

    void enable();
    // Throws SyscallError (ENOSYS) if the kernel lacks one of `opcodes`. Kernels before 5.6 do not tell.
    void require(std::initializer_list<unsigned> opcodes);
    // A zeroed entry. There is always room: at most `entries` are prepared between two calls of enter().
    io_uring_sqe& prepare();
    // Submits what was prepared and waits for at least one completion. Throws SyscallError.
    void enter();
    void reap(std::vector<Completion>& out);

private:
    void unmap();

    int fd_ = -1;
    bool disabled_ = false;
    bool holding_ = false;
    std::byte* rings_ = nullptr;
    size_t rings_bytes_ = 0;
    io_uring_sqe* sqes_ = nullptr;
    size_t sqes_bytes_ = 0;
    unsigned* sq_head_ = nullptr;
    unsigned* sq_tail_ = nullptr;
    unsigned* sq_array_ = nullptr;
    unsigned sq_mask_ = 0;
    unsigned tail_ = 0;  // ours: published by enter()
    unsigned* cq_head_ = nullptr;
    unsigned* cq_tail_ = nullptr;
    io_uring_cqe* cqes_ = nullptr;
    unsigned cq_mask_ = 0;
};

}  // namespace tierstore

#endif
