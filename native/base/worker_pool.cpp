#include "native/base/worker_pool.hpp"

#include <stdexcept>
#include <utility>

#include "native/base/thread.hpp"

namespace tierstore {

WorkerPool::WorkerPool(size_t threads, std::function<void()> on_start) : on_start_(std::move(on_start)) {
    threads_.reserve(threads);
    try {
        for (size_t i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
    } catch (...) {
        close();
        throw;
    }
}

WorkerPool::~WorkerPool() { close(); }

void WorkerPool::submit(std::function<void()> task, Urgency urgency) {
    {
        std::lock_guard lock(mutex_);
        (urgency == Urgency::Urgent ? urgent_ : normal_).push_back(std::move(task));
    }
    wake_.notify_one();
}

void WorkerPool::close() {
    {
        std::lock_guard lock(mutex_);
        closing_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
}

void WorkerPool::work() {
    prepare_thread("tierstore-work");
    if (on_start_) on_start_();
    std::unique_lock lock(mutex_);
    for (;;) {
        auto& queue = urgent_.empty() ? normal_ : urgent_;
        if (queue.empty()) {
            if (closing_) return;
            wake_.wait(lock);
            continue;
        }
        auto task = std::move(queue.front());
        queue.pop_front();
        lock.unlock();
        task();
        task = nullptr;  // what it owns goes before the next wait, and outside the lock
        lock.lock();
    }
}

}  // namespace tierstore
