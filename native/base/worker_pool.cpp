#include "native/base/worker_pool.hpp"

#include <algorithm>
#include <iterator>
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

void WorkerPool::submit(std::function<void()> task, Urgency urgency, uint64_t key) {
    {
        std::lock_guard lock(mutex_);
        auto& queue = urgency == Urgency::Urgent ? urgent_ : urgency == Urgency::Normal ? normal_ : idle_;
        queue.push_back({std::move(task), key});
    }
    wake_.notify_one();
}

void WorkerPool::promote(uint64_t key) {
    std::lock_guard lock(mutex_);
    for (auto* queue : {&normal_, &idle_}) {
        const auto found = std::stable_partition(queue->begin(), queue->end(),
                                                 [key](const Task& task) { return task.key != key; });
        std::move(found, queue->end(), std::back_inserter(urgent_));
        queue->erase(found, queue->end());
    }
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

// The next task. Called with the mutex held.
WorkerPool::Task WorkerPool::take() {
    Task task;
    if (auto& queue = urgent_.empty() ? normal_ : urgent_; !queue.empty()) {
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
        Task task = take();
        if (!task.run) {
            if (closing_) return;
            wake_.wait(lock);
            continue;
        }
        lock.unlock();
        task.run();
        task = {};  // what it owns goes before the next wait, and outside the lock
        lock.lock();
    }
}

}  // namespace tierstore
