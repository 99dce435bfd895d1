// The io_uring backend: one thread owns the ring, hands chunks to the kernel and reaps what comes back.
// Submitting threads only queue: with direct I/O the kernel pins a chunk's pages as it is handed over, and
// that is not the caller's to wait for.
#include "native/io/ring.hpp"

#include "native/base/thread.hpp"
#include "native/io/request_queue.hpp"

#ifdef TIERSTORE_HAS_URING

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <future>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace tierstore {
namespace {

constexpr uint64_t kWake = 0;  // user_data of the poll on the wake descriptor; a chunk's is its address

struct EventFd {
    EventFd() : fd(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
        if (fd < 0) throw SyscallError(errno, "eventfd");
    }
    ~EventFd() { ::close(fd); }
    int fd;
};

class UringBackend final : public Backend {
public:
    explicit UringBackend(const BackendOptions& options)
        : depth_(options.queue_depth), ring_(checked_entries(options)), queue_(options.chunk_bytes) {
        if (!options.lease_fds.empty()) ring_.hold(options.lease_fds);
        thread_ = std::thread([this] { work(); });
        try {
            started_.get_future().get();
        } catch (...) {
            thread_.join();
            throw;
        }
    }
    ~UringBackend() override { close(); }

    void submit(IoRequest request) override {
        std::lock_guard lock(mutex_);
        queue_.push(std::move(request));
        wake();
    }

    bool cancel(uint64_t id) override {
        std::lock_guard lock(mutex_);
        const bool taken = queue_.cancel(id);
        if (taken && queue_.active() == 0) idle_.notify_all();
        return taken;
    }

    void promote(uint64_t id) override {
        std::lock_guard lock(mutex_);
        queue_.promote(id);
    }

    void drain() override {
        std::unique_lock lock(mutex_);
        idle_.wait(lock, [this] { return queue_.active() == 0 && !calling_back_; });
    }

    void close() override {
        drain();
        {
            std::lock_guard lock(mutex_);
            closing_ = true;
            wake();
        }
        if (thread_.joinable()) thread_.join();
    }

private:
    static unsigned checked_entries(const BackendOptions& options) {
        if (options.queue_depth == 0 || options.queue_depth > 4096)
            throw std::invalid_argument("queue_depth must be from 1 to 4096");
        return static_cast<unsigned>(options.queue_depth) + 1;  // and the wake
    }

    // With the mutex held. Only a thread that said that it sleeps is worth a system call.
    void wake() {
        if (!asleep_) return;
        asleep_ = false;
        const uint64_t one = 1;
        (void)!::write(wake_.fd, &one, sizeof one);
    }

    void work() {
        prepare_thread("tierstore-ring");
        try {
            start();
        } catch (...) {
            started_.set_exception(std::current_exception());
            return;
        }
        started_.set_value();
        try {
            while (fill()) {
                ring_.enter();
                reap();
            }
            ring_.let_go();
        } catch (const std::exception& error) {
            // The ring fails: operations in flight can be neither waited for nor abandoned, since the kernel
            // may still write to their memory.
            std::fprintf(stderr, "tierstore: %s\n", error.what());
            std::abort();
        }
    }

    // Sends an operation that does nothing through the ring: a seccomp filter may allow setting a ring up but not
    // entering it. Throws SyscallError, with nothing in flight.
    void start() {
        ring_.enable();
        ring_.require(
            {IORING_OP_READV, IORING_OP_WRITEV, IORING_OP_FSYNC, IORING_OP_FALLOCATE, IORING_OP_POLL_ADD});
        ring_.prepare().opcode = IORING_OP_NOP;
        ring_.enter();
        ring_.reap(completions_);
        for (const Completion& completion : completions_)
            if (completion.result < 0) throw SyscallError(-completion.result, "a NOP in the io_uring");
    }

    // Prepares the chunks that may start, and the wake. False after close(), once no request is left.
    bool fill() {
        {
            std::lock_guard lock(mutex_);
            while (in_flight_ + starting_.size() < depth_) {
                auto chunk = queue_.next();
                if (!chunk) break;
                starting_.push_back(std::move(chunk));
            }
            if (closing_ && queue_.active() == 0) return false;
            // At full depth a completion comes first anyway.
            asleep_ = in_flight_ + starting_.size() < depth_;
        }
        for (auto& chunk : starting_) prepare(chunk.release());
        starting_.clear();
        if (!wake_armed_) {
            io_uring_sqe& sqe = ring_.prepare();
            sqe.opcode = IORING_OP_POLL_ADD;
            sqe.fd = wake_.fd;
            sqe.poll_events = POLLIN;
            sqe.user_data = kWake;
            wake_armed_ = true;
        }
        return true;
    }

    // Owns `chunk` from here until its completion.
    void prepare(Chunk* chunk) {
        if (chunk->must_pause()) std::this_thread::sleep_for(std::chrono::microseconds(100));
        if (chunk->transfers()) chunk->prepare();
        io_uring_sqe& sqe = ring_.prepare();
        sqe.fd = chunk->fd();
        sqe.user_data = reinterpret_cast<uint64_t>(chunk);
        if (chunk->kind() == IoKind::Sync) {
            sqe.opcode = IORING_OP_FSYNC;
            sqe.fsync_flags = IORING_FSYNC_DATASYNC;
        } else if (chunk->kind() == IoKind::Punch) {
            sqe.opcode = IORING_OP_FALLOCATE;
            sqe.off = chunk->offset();
            sqe.addr = chunk->hole_bytes();
            sqe.len = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
        } else {
            sqe.opcode = chunk->kind() == IoKind::Read ? IORING_OP_READV : IORING_OP_WRITEV;
            sqe.off = chunk->offset();
            sqe.addr = reinterpret_cast<uint64_t>(chunk->vector().data());
            sqe.len = static_cast<unsigned>(chunk->vector().size());
        }
        ++in_flight_;
    }

    void reap() {
        completions_.clear();
        ring_.reap(completions_);
        for (const Completion& completion : completions_) {
            if (completion.user_data == kWake) {
                wake_armed_ = false;
                uint64_t count;
                (void)!::read(wake_.fd, &count, sizeof count);
                continue;
            }
            std::unique_ptr<Chunk> chunk(reinterpret_cast<Chunk*>(completion.user_data));
            --in_flight_;
            if (chunk->advance(completion.result) == Progress::Again) {
                starting_.push_back(std::move(chunk));
            } else {
                retire(std::move(chunk));
            }
        }
    }

    void retire(std::unique_ptr<Chunk> chunk) {
        std::shared_ptr<ActiveRequest> finished;
        {
            std::lock_guard lock(mutex_);
            finished = queue_.retire(*chunk);
            if (finished) calling_back_ = true;
        }
        if (!finished) return;
        chunk.reset();
        finished->request.complete(result(*finished));
        finished.reset();  // what the request owns goes outside the lock
        std::lock_guard lock(mutex_);
        calling_back_ = false;
        if (queue_.active() == 0) idle_.notify_all();
    }

    const size_t depth_;
    EventFd wake_;

    // The ring thread's own.
    Ring ring_;
    size_t in_flight_ = 0;
    bool wake_armed_ = false;
    std::vector<std::unique_ptr<Chunk>> starting_;
    std::vector<Completion> completions_;

    std::mutex mutex_;  // guards what follows, up to the thread
    std::condition_variable idle_;
    RequestQueue queue_;
    bool calling_back_ = false;
    bool asleep_ = false;
    bool closing_ = false;

    std::promise<void> started_;
    std::thread thread_;
};

}  // namespace

std::unique_ptr<Backend> make_uring_backend(const BackendOptions& options) {
    return std::make_unique<UringBackend>(options);
}

}  // namespace tierstore

#else

#include <cerrno>

namespace tierstore {

std::unique_ptr<Backend> make_uring_backend(const BackendOptions&) {
    throw SyscallError(ENOSYS, "io_uring, built without <linux/io_uring.h>");
}

}  // namespace tierstore

#endif
