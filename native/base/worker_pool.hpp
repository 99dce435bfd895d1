// A fixed number of threads that run tasks by urgency.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tierstore {

// Urgent and normal tasks run in order of arrival. Idle ones run when there are no others, the last to arrive first.
enum class Urgency { Idle, Normal, Urgent };

// Tasks must not throw and must not wait for one another. close() joins the threads; the destructor calls it, and
// must not be that of a static object, since the threads' own data may be gone by then.
class WorkerPool {
public:
    // `on_start` runs first on each thread (to set its floating-point mode).
    explicit WorkerPool(size_t threads, std::function<void()> on_start = {});
    ~WorkerPool();
    WorkerPool(const WorkerPool&) = delete;
    WorkerPool& operator=(const WorkerPool&) = delete;

    // `key`: what promote() calls the task; several may have the same.
    void submit(std::function<void()> task, Urgency urgency = Urgency::Normal, uint64_t key = 0);
    // Makes the queued tasks of `key` urgent.
    void promote(uint64_t key);

    size_t size() const { return threads_.size(); }

    // Runs all queued tasks, then joins the threads. Later calls do nothing.
    void close();

private:
    struct Task {
        std::function<void()> run;  // empty: none
        uint64_t key = 0;
    };

    void work();
    Task take();

    std::mutex mutex_;  // guards everything below but threads_
    std::condition_variable wake_;
    std::deque<Task> urgent_;
    std::deque<Task> normal_;
    std::deque<Task> idle_;
    bool closing_ = false;
    std::function<void()> on_start_;
    std::vector<std::thread> threads_;
};

}  // namespace tierstore
