// A fixed number of threads that run tasks by urgency.
#pragma once

#include <condition_variable>
#include <cstddef>
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

    void submit(std::function<void()> task, Urgency urgency = Urgency::Normal);

    size_t size() const { return threads_.size(); }

    // Runs all queued tasks, then joins the threads. Later calls do nothing.
    void close();

private:
    void work();
    // Called with the mutex held; empty: nothing is queued.
    std::function<void()> take();

    std::mutex mutex_;  // guards everything below but threads_
    std::condition_variable wake_;
    std::deque<std::function<void()>> urgent_;
    std::deque<std::function<void()>> normal_;
    std::vector<std::function<void()>> idle_;
    bool closing_ = false;
    std::function<void()> on_start_;
    std::vector<std::thread> threads_;
};

}  // namespace tierstore
