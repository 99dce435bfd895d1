#include "native/engine/engine.hpp"

#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <stdexcept>
#include <utility>

#include "native/base/align.hpp"

namespace tierstore {
namespace {

Urgency urgency(Priority priority) {
    switch (priority) {
        case Priority::Demand: return Urgency::Urgent;
        case Priority::Idle: return Urgency::Idle;
        default: return Urgency::Normal;
    }
}

// How much nicer compute threads are than others. The threads of one product wait for each other, so each that waits for
// a processor stops them all: a step of a model of 1.3 billion parameters in memory, on two processors, took 1.13 times
// its processor time, 1.10 with 5, 1.09 with 10. With 5 they still have a quarter of a processor beside another program.
constexpr int kNicer = 5;

void start_compute_thread() {
    flush_subnormals();
    setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + kNicer);  // on Linux: of this thread
}

}  // namespace

Engine::Engine(const EngineOptions& options) : failed_(options.failures) {
    if (options.compute_threads == 0) throw std::invalid_argument("compute_threads must be at least 1");
    if (!options.log_path.empty()) log_ = std::make_shared<EventLog>(options.log_path);
    MadeBackend made = make_backend(options.backend, options.io);
    backend_ = std::move(made.backend);
    backend_name_ = made.name;
    backend_reason_ = std::move(made.reason);
    if (log_) backend_ = make_recording_backend(std::move(backend_), log_);
    pool_ = std::make_unique<WorkerPool>(options.compute_threads, start_compute_thread);
    event_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (event_fd_ < 0) throw SyscallError(errno, "eventfd");
}

Engine::~Engine() {
    close();
    if (getpid() != owner_) {
        // In a forked child: the threads belong to the parent, so there are none to join.
        (void)timer_.release();
        (void)backend_.release();
        (void)pool_.release();
    }
    ::close(event_fd_);
}

// ---- submitting

Engine::OperationPtr Engine::transfer_operation(Kind kind, Transfer transfer) {
    if (!is_power_of_two(transfer.align)) throw std::invalid_argument("align must be a power of two");
    if (transfer.crcs && (transfer.first_crc > transfer.crcs->size() ||
                          transfer.sections.size() > transfer.crcs->size() - transfer.first_crc))
        throw std::invalid_argument("the checksum table has no entries for these sections");
    auto operation = std::make_unique<Operation>();
    operation->kind = kind;
    for (const Buffer& section : transfer.sections) {
        const size_t padded = round_up(section.nbytes(), transfer.align);
        if (padded > section.capacity())
            throw std::invalid_argument("a section of " + std::to_string(section.nbytes()) +
                                        " bytes needs room for " + std::to_string(padded) +
                                        ", its spans have " + std::to_string(section.capacity()));
        operation->nbytes += padded;
    }
    if (operation->nbytes == 0) throw std::invalid_argument("a transfer of no bytes");
    operation->transfer = std::move(transfer);
    operation->label = {kind == Kind::Read ? Activity::Read : Activity::Write, operation->nbytes};
    return operation;
}

Ticket Engine::read(Transfer transfer, Order order) {
    return submit(transfer_operation(Kind::Read, std::move(transfer)), order);
}

Ticket Engine::write(Transfer transfer, Order order) {
    return submit(transfer_operation(Kind::Write, std::move(transfer)), order);
}

Ticket Engine::sync(OpenFilePtr file, Order order) {
    auto operation = std::make_unique<Operation>();
    operation->kind = Kind::Sync;
    operation->label.activity = Activity::Sync;
    operation->transfer.file = std::move(file);
    return submit(std::move(operation), order);
}

Ticket Engine::punch(OpenFilePtr file, uint64_t offset, uint64_t nbytes, Order order) {
    if (nbytes == 0) throw std::invalid_argument("a hole of no bytes");
    auto operation = std::make_unique<Operation>();
    operation->kind = Kind::Punch;
    operation->label = {Activity::Punch, nbytes};
    operation->transfer.file = std::move(file);
    operation->transfer.offset = offset;
    operation->hole_bytes = nbytes;
    return submit(std::move(operation), order);
}

Ticket Engine::compute(Work work, Order order, Label label) {
    std::vector<Work> parts;
    parts.push_back(std::move(work));
    return compute(std::move(parts), order, label);
}

Ticket Engine::compute(std::vector<Work> parts, Order order, Label label) {
    if (parts.empty()) throw std::invalid_argument("an operation of no parts");
    auto operation = std::make_unique<Operation>();
    operation->kind = Kind::Compute;
    operation->unfinished = parts.size();
    operation->parts = std::move(parts);
    operation->label = label;
    return submit(std::move(operation), order);
}

Ticket Engine::hold(std::shared_ptr<Link> link, Order order, Label label) {
    if (!link) throw std::invalid_argument("a hold needs a link");
    auto operation = std::make_unique<Operation>();
    operation->kind = Kind::Hold;
    operation->link = std::move(link);
    operation->label = label;
    return submit(std::move(operation), order);
}

Ticket Engine::barrier(Order order) {
    auto operation = std::make_unique<Operation>();
    operation->kind = Kind::Barrier;
    return submit(std::move(operation), order);
}

Ticket Engine::external(Order order) {
    auto operation = std::make_unique<Operation>();
    operation->kind = Kind::External;
    return submit(std::move(operation), order);
}

Ticket Engine::submit(OperationPtr operation, Order order) {
    Remains remains;  // destroyed after the lock
    std::lock_guard lock(mutex_);
    if (closing_) throw EngineClosed();
    for (Ticket earlier : order.after) check(earlier);
    const Ticket ticket = next_++;
    operation->ticket = ticket;
    operation->priority = order.priority;
    Operation& added = *operation;
    operations_.emplace(ticket, std::move(operation));
    for (Ticket earlier : order.after) {
        if (Operation* before = find(earlier)) {
            before->dependents.push_back(ticket);
            added.after.push_back(earlier);
            ++added.unmet;
        } else if (!added.inherited) {
            added.inherited = failed_.find(earlier);
        }
    }
    if (added.inherited && added.unmet == 0) {
        finish(ticket, added.inherited, remains);
        return ticket;
    }
    if (added.priority == Priority::Demand)
        for (Ticket earlier : added.after) promote_locked(earlier);
    if (added.unmet == 0) start(added, remains);
    return ticket;
}

void Engine::check(Ticket ticket) const {
    if (ticket == 0 || ticket >= next_)
        throw std::invalid_argument("ticket " + std::to_string(ticket) + " was never given out");
}

Engine::Operation* Engine::find(Ticket ticket) {
    const auto it = operations_.find(ticket);
    return it == operations_.end() ? nullptr : it->second.get();
}

// ---- running

// What it follows is done. Called with the mutex held, as all that follows unless it says otherwise.
void Engine::start(Operation& operation, Remains& remains) {
    switch (operation.kind) {
        case Kind::Barrier: finish(operation.ticket, nullptr, remains); return;
        case Kind::External:
            if (operation.completed_outside) finish(operation.ticket, nullptr, remains);
            return;
        case Kind::Write:
        case Kind::Sync:
        case Kind::Punch:
            if (poisoned_) {
                finish(operation.ticket, poisoned_, remains);
                return;
            }
            break;
        default: break;
    }
    operation.state = State::Queued;
    const Ticket ticket = operation.ticket;
    if (operation.kind == Kind::Hold) {
        operation.slot = operation.link->reserve(operation.label.nbytes, monotonic_ns());
        if (operation.priority == Priority::Demand) {
            hold_urgently(operation);
        } else {
            timer_->at(operation.slot.patient_end_ns, [this, ticket] { on_time(ticket); });
        }
    } else if (operation.kind == Kind::Compute) {
        for (size_t part = 0; part < operation.parts.size(); ++part)
            pool_->submit([this, ticket, part] { run_compute(ticket, part); }, urgency(operation.priority),
                          ticket);
    } else if (operation.kind == Kind::Write && needs_seal(operation.transfer)) {
        pool_->submit([this, ticket] { run_seal(ticket); }, urgency(operation.priority), ticket);
    } else {
        send(operation);
    }
}

void Engine::send(Operation& operation) {
    IoRequest request;
    request.id = operation.ticket;
    request.kind = operation.kind == Kind::Read    ? IoKind::Read
                   : operation.kind == Kind::Write ? IoKind::Write
                   : operation.kind == Kind::Sync  ? IoKind::Sync
                                                   : IoKind::Punch;
    request.priority = operation.priority;
    request.file = operation.transfer.file;
    request.offset = operation.transfer.offset;
    request.nbytes = operation.nbytes;
    request.hole_bytes = operation.hole_bytes;
    for (const Span& span : transfer_spans(operation.transfer))
        request.parts.push_back({span.data, span.nbytes});
    request.complete = [this, ticket = operation.ticket](const IoResult& result) { on_io(ticket, result); };
    operation.in_backend = true;
    backend_->submit(std::move(request));
}

// A queued operation that its thread now takes; null when it was cancelled meanwhile. Takes the mutex. What
// it returns stays: only its own thread finishes a running operation.
Engine::Operation* Engine::begin(Ticket ticket) {
    std::lock_guard lock(mutex_);
    Operation* operation = find(ticket);
    if (operation) operation->state = State::Running;
    return operation;
}

// On a compute thread, without the mutex.
void Engine::run_compute(Ticket ticket, size_t part) {
    Operation* operation = begin(ticket);
    if (!operation) return;
    const uint64_t started = monotonic_ns();
    FailurePtr failure;
    try {
        operation->parts[part]();
    } catch (...) {
        failure = current_failure();
    }
    Remains remains;
    std::lock_guard lock(mutex_);
    const uint64_t ended = monotonic_ns();
    stats_.compute_ns += ended - started;
    if (operation->started_ns == 0 || started < operation->started_ns) operation->started_ns = started;
    if (failure && !operation->failure) operation->failure = std::move(failure);
    if (--operation->unfinished > 0) return;
    stats_.compute_ops += 1;
    record(*operation, operation->started_ns, ended);
    finish(ticket, std::move(operation->failure), remains);
}

// On a compute thread, without the mutex: checksums first, then the backend.
void Engine::run_seal(Ticket ticket) {
    Operation* operation = begin(ticket);
    if (!operation) return;
    FailurePtr failure;
    {
        std::lock_guard lock(mutex_);
        failure = poisoned_;
    }
    if (!failure) seal(operation->transfer);
    Remains remains;
    std::lock_guard lock(mutex_);
    if (failure) {
        finish(ticket, std::move(failure), remains);
    } else {
        send(*operation);
    }
}

// On a compute thread, without the mutex.
void Engine::run_verify(Ticket ticket) {
    Operation* operation = begin(ticket);
    FailurePtr failure;
    try {
        verify_checksums(operation->transfer);
    } catch (...) {
        failure = current_failure();
    }
    Remains remains;
    std::lock_guard lock(mutex_);
    finish(ticket, std::move(failure), remains);
}

// On a backend's thread, without the mutex.
void Engine::on_io(Ticket ticket, const IoResult& result) {
    Remains remains;
    std::lock_guard lock(mutex_);
    Operation& operation = *find(ticket);
    operation.in_backend = false;
    operation.state = State::Running;
    stats_.continued_transfers += result.continued;
    const uint64_t moved = result.failure ? 0 : operation.nbytes;
    const uint64_t now = monotonic_ns();
    record(operation, now - result.service_ns, now);
    if (Meter* meter = operation.transfer.file->meter.get(); meter && operation.kind != Kind::Punch) {
        // A sync counts as time without bytes: it moves what writes have left in the page cache. A punch does not count: it
        // moves nothing, and would make the drive look slower.
        if (operation.kind == Kind::Read) meter->read(moved, now - result.service_ns, now);
        else meter->wrote(operation.kind == Kind::Write ? moved : 0, now - result.service_ns, now);
    }
    switch (operation.kind) {
        case Kind::Read:
            stats_.reads += 1;
            stats_.read_bytes += moved;
            stats_.read_ns += result.service_ns;
            if (!result.failure && operation.transfer.crcs) {
                pool_->submit([this, ticket] { run_verify(ticket); }, urgency(operation.priority), ticket);
                return;
            }
            break;
        case Kind::Write:
            stats_.writes += 1;
            stats_.written_bytes += moved;
            stats_.write_ns += result.service_ns;
            break;
        case Kind::Punch: finish(ticket, result.failure, remains); return;
        default:
            stats_.syncs += 1;
            stats_.sync_ns += result.service_ns;
            break;
    }
    if (result.failure && operation.kind != Kind::Read && !poisoned_) poisoned_ = result.failure;
    finish(ticket, result.failure, remains);
}

// On the timer's thread, without the mutex.
void Engine::on_time(Ticket ticket) {
    Remains remains;
    std::lock_guard lock(mutex_);
    const Operation* operation = find(ticket);
    if (!operation) return;  // cancelled meanwhile
    record(*operation, operation->slot.start_ns, operation->slot.end_ns);
    finish(ticket, nullptr, remains);
}

void Engine::record(const Operation& operation, uint64_t start_ns, uint64_t end_ns) {
    spans_.add({operation.label, operation.kind == Kind::Hold, operation.ticket, start_ns, end_ns});
}

// Ends an operation, and then, one after another, each follower that fails because of it, or that becomes ready and
// ends at once.
void Engine::finish(Ticket ticket, FailurePtr failure, Remains& remains) {
    std::deque<std::pair<Ticket, FailurePtr>> ending;
    std::vector<Ticket> ready;
    ending.emplace_back(ticket, std::move(failure));
    bool signal = false;
    bool awaited = false;
    while (!ending.empty()) {
        const auto [ended, why] = std::move(ending.front());
        ending.pop_front();
        const auto it = operations_.find(ended);
        if (it == operations_.end())
            continue;  // failed already, through another of the tickets that it follows
        OperationPtr operation = std::move(it->second);
        operations_.erase(it);
        if (why) {
            failed_.add(ended, why);
            ++stats_.failed_ops;
        }
        awaited |= operation->awaited;
        if (operation->blocking) operation->link->unblock(monotonic_ns());
        if (operation->notify) {
            notified_.push_back(ended);
            signal = true;
        }
        for (Ticket dependent : operation->dependents) {
            Operation* next = find(dependent);
            if (!next) continue;
            if (why && !next->inherited) next->inherited = why;
            if (--next->unmet == 0) {
                if (next->inherited) {
                    ending.emplace_back(dependent, next->inherited);
                } else if (next->kind == Kind::Barrier ||
                           (next->kind == Kind::External && next->completed_outside)) {
                    ending.emplace_back(dependent, nullptr);
                } else {
                    ready.push_back(dependent);
                }
            }
        }
        remains.push_back(std::move(operation));
    }
    for (Ticket dependent : ready)
        if (Operation* next = find(dependent)) start(*next, remains);
    if (signal) signal_event();
    if (awaited || (closing_ && operations_.empty())) changed_.notify_all();
}

void Engine::complete_external(Ticket ticket, const std::string& error) {
    Remains remains;
    std::lock_guard lock(mutex_);
    check(ticket);
    Operation* operation = find(ticket);
    if (!operation) return;  // cancelled or failed meanwhile
    if (operation->kind != Kind::External)
        throw std::invalid_argument("not the ticket of an external operation");
    operation->completed_outside = true;
    if (!error.empty()) {
        finish(ticket, make_failure(std::runtime_error(error)), remains);
    } else if (operation->unmet == 0) {
        finish(ticket, nullptr, remains);
    }
}

// ---- waiting and cancelling

bool Engine::wait(Ticket ticket, std::chrono::nanoseconds timeout) {
    std::unique_lock lock(mutex_);
    check(ticket);
    if (find(ticket)) {
        if (timeout.count() > 0) {
            promote_locked(ticket);
            find(ticket)->awaited = true;
            changed_.wait_for(lock, timeout, [&] { return find(ticket) == nullptr; });
        }
        if (find(ticket)) return false;
    }
    if (const FailurePtr failure = failed_.find(ticket)) {
        lock.unlock();
        failure->raise();
    }
    return true;
}

bool Engine::done(Ticket ticket) {
    std::lock_guard lock(mutex_);
    check(ticket);
    return find(ticket) == nullptr;
}

bool Engine::cancel(Ticket ticket) {
    static const FailurePtr cancelled = make_failure(Cancelled());
    Remains remains;
    std::lock_guard lock(mutex_);
    check(ticket);
    Operation* operation = find(ticket);
    return operation && cancel_locked(*operation, cancelled, remains);
}

bool Engine::cancel_locked(Operation& operation, const FailurePtr& failure, Remains& remains) {
    if (operation.state == State::Running) return false;
    if (operation.in_backend && !backend_->cancel(operation.ticket)) return false;
    finish(operation.ticket, failure, remains);
    return true;
}

void Engine::promote(Ticket ticket) {
    std::lock_guard lock(mutex_);
    check(ticket);
    promote_locked(ticket);
}

void Engine::promote_locked(Ticket ticket) {
    std::vector<Ticket> todo{ticket};
    while (!todo.empty()) {
        Operation* operation = find(todo.back());
        todo.pop_back();
        if (!operation || operation->priority == Priority::Demand) continue;  // then so is what it waits for
        operation->priority = Priority::Demand;
        if (operation->in_backend) backend_->promote(operation->ticket);
        else if (operation->state != State::Waiting) pool_->promote(operation->ticket);
        if (operation->kind == Kind::Hold && operation->state == State::Queued) hold_urgently(*operation);
        todo.insert(todo.end(), operation->after.begin(), operation->after.end());
    }
}

// A caller waits for the turn, so it may end earlier: a second timer is set. Whichever fires later finds it finished.
void Engine::hold_urgently(Operation& operation) {
    const uint64_t now = monotonic_ns();
    if (operation.slot.end_ns > now) {
        operation.link->block(now);
        operation.blocking = true;
    }
    timer_->at(operation.slot.end_ns, [this, ticket = operation.ticket] { on_time(ticket); });
}

void Engine::notify(Ticket ticket) {
    std::lock_guard lock(mutex_);
    check(ticket);
    if (Operation* operation = find(ticket)) {
        operation->notify = true;
    } else {
        notified_.push_back(ticket);
        signal_event();
    }
}

std::vector<Ticket> Engine::drain_notified() {
    std::lock_guard lock(mutex_);
    uint64_t count;
    (void)!::read(event_fd_, &count, sizeof count);  // EAGAIN: nothing was signalled
    return std::exchange(notified_, {});
}

void Engine::signal_event() {
    const uint64_t one = 1;
    (void)!::write(event_fd_, &one, sizeof one);  // cannot fail: the counter never comes near its limit
}

// ---- the rest

EngineStats Engine::stats() {
    std::lock_guard lock(mutex_);
    EngineStats stats = stats_;
    stats.kept_failures = failed_.size();
    for (const auto& [ticket, operation] : operations_)
        ++(operation->state == State::Waiting ? stats.waiting : stats.in_flight);
    return stats;
}

FailurePtr Engine::poisoned() {
    std::lock_guard lock(mutex_);
    return poisoned_;
}

void Engine::record_spans(size_t capacity) {
    std::lock_guard lock(mutex_);
    spans_.resize(capacity);
}

std::pair<std::vector<OperationSpan>, uint64_t> Engine::drain_spans() {
    std::lock_guard lock(mutex_);
    return spans_.drain();
}

void Engine::log_mark(const std::string& text) {
    if (log_) log_->mark(text);
}

void Engine::close() {
    if (getpid() != owner_) return;
    Remains remains;
    std::unique_lock lock(mutex_);
    if (closing_) {
        changed_.wait(lock, [this] { return closed_; });
        return;
    }
    closing_ = true;
    const FailurePtr closed = make_failure(EngineClosed());
    std::vector<Ticket> tickets;
    for (const auto& [ticket, operation] : operations_) tickets.push_back(ticket);
    for (Ticket ticket : tickets)
        if (Operation* operation = find(ticket)) cancel_locked(*operation, closed, remains);
    changed_.wait(lock, [this] { return operations_.empty(); });
    lock.unlock();
    remains.clear();
    timer_->close();
    backend_->close();
    pool_->close();
    backend_.reset();  // and with it the ring, and the lease that it holds
    lock.lock();
    closed_ = true;
    changed_.notify_all();
}

}  // namespace tierstore
