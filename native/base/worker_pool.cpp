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
        switch (urgency) {
            case Urgency::Urgent: urgent_.push_back(std::move(task)); break;
            case Urgency::Normal: normal_.push_back(std::move(task)); break;
            case Urgency::Idle: idle_.push_back(std::move(task)); break;
        }
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

std::function<void()> WorkerPool::take() {
    std::function<void()> task;
    if (!urgent_.empty() || !normal_.empty()) {
        auto& queue = urgent_.empty() ? normal_ : urgent_;
        task = std::move(queue.front());
        queue.pop_front();
    } else if (!idle_.empty()) {
        task = std::move(idle_.back());
        idle_.pop_back();
    }
    return task;
}

void WorkerPool::work() {
    prepare_thread("tierstore-work");
    if (on_start_) on_start_();
    std::unique_lock lock(mutex_);
    for (;;) {
        auto task = take();
        if (!task) {
            if (closing_) return;
            wake_.wait(lock);
            continue;
        }
        lock.unlock();
        task();
        task = nullptr;  // what it owns goes before the next wait, and outside the lock
        lock.lock();
    }
}

}  // namespace tierstore
