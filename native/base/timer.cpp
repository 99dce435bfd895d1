#include "native/base/timer.hpp"

#include <sys/prctl.h>

#include <chrono>
#include <utility>

#include "native/base/thread.hpp"

namespace tierstore {

Timer::~Timer() { close(); }

void Timer::at(uint64_t due_ns, std::function<void()> task) {
    {
        std::lock_guard lock(mutex_);
        if (closing_) return;
        if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
        const bool sooner = tasks_.empty() || due_ns < tasks_.begin()->first;
        tasks_.emplace(due_ns, std::move(task));
        if (!sooner) return;
    }
    wake_.notify_one();
}

void Timer::close() {
    std::multimap<uint64_t, std::function<void()>> dropped;  // destroyed after the lock
    std::thread thread;
    {
        std::lock_guard lock(mutex_);
        closing_ = true;
        dropped.swap(tasks_);
        thread.swap(thread_);
    }
    wake_.notify_one();
    if (thread.joinable()) thread.join();
}

void Timer::work() {
    using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC
    prepare_thread("tierstore-timer");
    prctl(PR_SET_TIMERSLACK, 1UL);  // the default of 50 us would be a latency of every link
    std::unique_lock lock(mutex_);
    while (!closing_) {
        if (tasks_.empty()) {
            wake_.wait(lock);
            continue;
        }
        const Clock::time_point due{std::chrono::nanoseconds(tasks_.begin()->first)};
        if (Clock::now() < due) {
            wake_.wait_until(lock, due);
            continue;
        }
        auto task = std::move(tasks_.begin()->second);
        tasks_.erase(tasks_.begin());
        lock.unlock();
        task();
        task = nullptr;  // what it owns goes outside the lock
        lock.lock();
    }
}

}  // namespace tierstore
