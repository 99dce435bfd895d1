// The ticket engine: reads, writes, copies and optimizer steps in the background, each after the tickets that it names,
// on a few threads that never run Python.
#pragma once

#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "native/base/error.hpp"
#include "native/base/timer.hpp"
#include "native/base/worker_pool.hpp"
#include "native/engine/failed_tickets.hpp"
#include "native/engine/link.hpp"
#include "native/engine/spans.hpp"
#include "native/engine/work.hpp"
#include "native/io/backend.hpp"
#include "native/io/recording.hpp"

namespace tierstore {

struct EngineOptions {
    IoBackend backend = IoBackend::Auto;
    BackendOptions io;
    size_t compute_threads = 1;
    FailedTickets failures;
    std::string log_path;  // not empty: log writes and syncs there (native/io/recording.hpp)
};

// Counted since the engine was created.
struct EngineStats {
    uint64_t read_bytes = 0;
    uint64_t written_bytes = 0;
    uint64_t reads = 0;
    uint64_t writes = 0;
    uint64_t syncs = 0;
    uint64_t compute_ops = 0;
    uint64_t failed_ops = 0;
    uint64_t kept_failures = 0;        // now: the failed_ops that are remembered by ticket
    uint64_t continued_transfers = 0;  // ended short and were continued
    uint64_t read_ns = 0;              // service time, summed over operations: they overlap
    uint64_t write_ns = 0;
    uint64_t sync_ns = 0;
    uint64_t compute_ns = 0;
    uint64_t waiting = 0;    // now: waiting for tickets that they follow, or for complete_external
    uint64_t in_flight = 0;  // now: queued or running
};

// `after` only names earlier tickets, and threads only receive operations that are ready, so no cycle of waiting is
// possible. Submitting never waits for a completion. A failed operation fails all that follow it, including those
// submitted later, with the same failure: failures are kept, in bounded memory (FailedTickets). A follower fails when
// all that it follows has ended: memory whose last ticket has ended, with or without failure, is not touched any more.
// A failed write or sync poisons the engine: every later write or sync fails with that failure without being tried;
// what they leave on disk is unknown, and a second sync would not tell.
//
// Thread-safe. One mutex guards the graph; operations hold no lock while they run.
class Engine {
public:
    struct Order {
        std::span<const Ticket> after = {};
        Priority priority = Priority::Demand;
    };

    explicit Engine(const EngineOptions& options);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Each throws std::invalid_argument for invalid arguments and EngineClosed after close().
    Ticket read(Transfer transfer, Order order);
    Ticket write(Transfer transfer, Order order);
    Ticket sync(OpenFilePtr file, Order order);
    // Returns the blocks of [offset, offset + nbytes) to the file system. A failure affects only this operation:
    // nothing that was written is in doubt.
    Ticket punch(OpenFilePtr file, uint64_t offset, uint64_t nbytes, Order order);
    Ticket compute(Work work, Order order, Label label = {});
    // Parts of one operation, which run on as many threads as there are; they write to disjoint memory.
    Ticket compute(std::vector<Work> parts, Order order, Label label = {});
    size_t compute_threads() const { return pool_->size(); }
    Ticket barrier(Order order);
    // A transfer of `label.nbytes` on a limited link, requested when all that it follows is done: finishes at the end
    // of its turn there, never before. Nothing is moved: it runs in parallel to the operation that moves the bytes,
    // after the same tickets, and a barrier joins the two. The link serves in order of requests, whatever the
    // priorities. If cancelled, it keeps its turn: what a real link has begun to send is sent. On a link with a burst
    // it finishes later if no caller waits for it (see Link).
    Ticket hold(std::shared_ptr<Link> link, Order order, Label label);
    // Done when complete_external() was called and all that it follows is done: for events outside the engine.
    Ticket external(Order order);
    // A non-empty `error` fails it.
    void complete_external(Ticket ticket, const std::string& error = {});

    // Whether it finished in time; throws its failure, each time, however late (an old one as ResultForgotten).
    // Waiting makes it, and what it waits for, urgent.
    bool wait(Ticket ticket, std::chrono::nanoseconds timeout);
    // Whether it has finished, with or without failure.
    bool done(Ticket ticket);
    // Cancels an operation that has not started; it and what follows it fail with Cancelled.
    bool cancel(Ticket ticket);
    // Makes it, and what it waits for, urgent.
    void promote(Ticket ticket);

    // For event loops: after notify(ticket), event_fd() becomes readable once it has finished, and drain_notified()
    // returns it.
    int event_fd() const { return event_fd_; }
    void notify(Ticket ticket);
    std::vector<Ticket> drain_notified();

    EngineStats stats();
    FailurePtr poisoned();
    const char* backend_name() const { return backend_name_; }
    // Why the backend is not the first requested one; empty if it is.
    const std::string& backend_reason() const { return backend_reason_; }
    // From now on, remembers when its last `capacity` operations ran (0: none).
    void record_spans(size_t capacity);
    // The operations finished since the last call, and how many more were overwritten before it.
    std::pair<std::vector<OperationSpan>, uint64_t> drain_spans();
    // Writes a mark to the event log, if there is one.
    void log_mark(const std::string& text);

    // Lets running operations finish, fails the rest with EngineClosed, joins the threads. Later calls do nothing.
    void close();

private:
    enum class Kind { Read, Write, Sync, Punch, Compute, Barrier, External, Hold };
    enum class State { Waiting, Queued, Running };

    struct Operation {
        Ticket ticket = 0;
        Kind kind = Kind::Barrier;
        State state = State::Waiting;
        Priority priority = Priority::Demand;
        size_t unmet = 0;           // tickets that it still waits for
        std::vector<Ticket> after;  // unfinished when submitted
        std::vector<Ticket> dependents;
        Transfer transfer;           // Read, Write; for Sync and Punch the file, for Punch the offset
        uint64_t hole_bytes = 0;     // Punch
        std::vector<Work> parts;     // Compute
        size_t unfinished = 0;       // parts
        uint64_t started_ns = 0;     // of the first part
        FailurePtr failure;          // of the first part that failed
        FailurePtr inherited;        // of the first failed ticket that it follows
        std::shared_ptr<Link> link;  // Hold
        Link::Slot slot = {};        // Hold: its turn, reserved when it is queued
        bool blocking = false;       // Hold: a caller waits, and only the link delays it
        Label label;
        size_t nbytes = 0;
        bool in_backend = false;
        bool completed_outside = false;  // External
        bool notify = false;             // see notify()
        bool awaited = false;            // a thread sleeps until it has finished
    };
    using OperationPtr = std::unique_ptr<Operation>;
    // Operations to be destroyed after the mutex is released, since an arena or file may be destroyed with them.
    using Remains = std::vector<OperationPtr>;

    OperationPtr transfer_operation(Kind kind, Transfer transfer);
    Ticket submit(OperationPtr operation, Order order);
    void check(Ticket ticket) const;
    Operation* find(Ticket ticket);
    void start(Operation& operation, Remains& remains);
    void send(Operation& operation);
    void promote_locked(Ticket ticket);
    void hold_urgently(Operation& operation);
    bool cancel_locked(Operation& operation, const FailurePtr& failure, Remains& remains);
    void finish(Ticket ticket, FailurePtr failure, Remains& remains);
    void run_compute(Ticket ticket, size_t part);
    void run_seal(Ticket ticket);
    void run_verify(Ticket ticket);
    void on_io(Ticket ticket, const IoResult& result);
    void on_time(Ticket ticket);
    void record(const Operation& operation, uint64_t start_ns, uint64_t end_ns);
    Operation* begin(Ticket ticket);
    void signal_event();

    std::shared_ptr<EventLog> log_;
    std::string backend_reason_;
    const char* backend_name_ = "";
    int event_fd_ = -1;
    const pid_t owner_ = getpid();  // a forked child has the memory, but not the threads

    std::mutex mutex_;  // guards what follows, up to the backend; never held while an operation runs
    std::condition_variable changed_;
    Ticket next_ = 1;
    std::unordered_map<Ticket, OperationPtr>
        operations_;        // unfinished; an absent earlier ticket succeeded ...
    FailedTickets failed_;  // ... unless it is here
    std::vector<Ticket> notified_;
    FailurePtr poisoned_;
    EngineStats stats_;
    SpanRing spans_;
    bool closing_ = false;
    bool closed_ = false;

    std::unique_ptr<Backend> backend_;
    std::unique_ptr<WorkerPool> pool_;
    std::unique_ptr<Timer> timer_ = std::make_unique<Timer>();
};

}  // namespace tierstore
