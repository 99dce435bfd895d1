// Threads that move chunks, each blocking in one at a time; and the backend that works everywhere, whose threads do
// so with preadv, pwritev and fdatasync.
#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "native/base/thread.hpp"
#include "native/io/threads.hpp"

namespace tierstore {
namespace {

class ThreadsBackend final : public Backend {
public:
    ThreadsBackend(const BackendOptions& options, std::unique_ptr<Mover> mover)
        : queue_(options.chunk_bytes), mover_(std::move(mover)) {
        if (options.threads == 0) throw std::invalid_argument("io_threads must be at least 1");
        try {
            for (size_t i = 0; i < options.threads; ++i) threads_.emplace_back([this] { work(); });
        } catch (...) {
            close();
            throw;
        }
    }
    ~ThreadsBackend() override { close(); }

    void submit(IoRequest request) override {
        {
            std::lock_guard lock(mutex_);
            queue_.push(std::move(request));
        }
        // A thread that finds more chunks left wakes the next one: see work().
        wake_.notify_one();
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
        idle_.wait(lock, [this] { return queue_.active() == 0 && calling_back_ == 0; });
    }

    void close() override {
        drain();
        {
            std::lock_guard lock(mutex_);
            closing_ = true;
        }
        wake_.notify_all();
        for (auto& thread : threads_) thread.join();
        threads_.clear();
    }

private:
    void run(Chunk& chunk) {
        Progress progress;
        do {
            if (chunk.must_pause()) std::this_thread::sleep_for(std::chrono::microseconds(100));
            if (chunk.transfers()) chunk.prepare();
            progress = chunk.advance(mover_->transfer(chunk));
        } while (progress == Progress::Again);
    }

    void work() {
        prepare_thread("tierstore-io");
        std::unique_lock lock(mutex_);
        for (;;) {
            auto chunk = queue_.next();
            if (!chunk) {
                if (closing_) return;
                wake_.wait(lock);
                continue;
            }
            if (queue_.pending()) wake_.notify_one();
            lock.unlock();
            run(*chunk);
            lock.lock();
            auto finished = queue_.retire(*chunk);
            if (!finished) continue;
            ++calling_back_;
            lock.unlock();
            chunk.reset();
            finished->request.complete(result(*finished));
            finished.reset();  // what the request owns goes outside the lock
            lock.lock();
            if (--calling_back_ == 0 && queue_.active() == 0) idle_.notify_all();
        }
    }

    std::mutex mutex_;  // guards everything below but threads_
    std::condition_variable wake_;
    std::condition_variable idle_;
    RequestQueue queue_;
    size_t calling_back_ = 0;
    bool closing_ = false;
    const std::unique_ptr<Mover> mover_;
    std::vector<std::thread> threads_;
};

class SystemCalls final : public Mover {
public:
    ssize_t transfer(const Chunk& chunk) override {
        ssize_t result;
        if (chunk.kind() == IoKind::Sync) {
            result = fdatasync(chunk.fd());
        } else if (chunk.kind() == IoKind::Punch) {
            return punch_hole(chunk);
        } else {
            const auto& v = chunk.vector();
            const auto count = static_cast<int>(v.size());
            const auto offset = static_cast<off_t>(chunk.offset());
            result = chunk.kind() == IoKind::Read ? preadv(chunk.fd(), v.data(), count, offset)
                                                  : pwritev(chunk.fd(), v.data(), count, offset);
        }
        return result < 0 ? -errno : result;
    }
};

}  // namespace

ssize_t punch_hole(const Chunk& chunk) {
    const int rc = fallocate(chunk.fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                             static_cast<off_t>(chunk.offset()), static_cast<off_t>(chunk.hole_bytes()));
    return rc == 0 ? 0 : -errno;
}

std::unique_ptr<Backend> make_threads_backend(const BackendOptions& options) {
    return make_threaded_backend(options, std::make_unique<SystemCalls>());
}

std::unique_ptr<Backend> make_threaded_backend(const BackendOptions& options, std::unique_ptr<Mover> mover) {
    return std::make_unique<ThreadsBackend>(options, std::move(mover));
}

}  // namespace tierstore
