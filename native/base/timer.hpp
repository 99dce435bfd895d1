// Tasks due at given times, on one thread that sleeps in between.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

namespace tierstore {

// Tasks must not throw; they run one at a time, in order of their times, never early. The first task starts the
// thread, so an unused timer costs nothing. close() joins it; the destructor calls close(), and a task must not.
class Timer {
public:
    Timer() = default;
    ~Timer();
    Timer(const Timer&) = delete;
    Timer& operator=(const Timer&) = delete;

    // `due_ns`: of CLOCK_MONOTONIC. After close() the task is dropped.
    void at(uint64_t due_ns, std::function<void()> task);

    // Drops tasks that are not due, lets a running task finish, joins the thread. Later calls do nothing.
    void close();

private:
    void work();

    std::mutex mutex_;  // guards what follows
    std::condition_variable wake_;
    std::multimap<uint64_t, std::function<void()>> tasks_;  // equal times: in order of arrival
    bool closing_ = false;
    std::thread thread_;
};

}  // namespace tierstore
