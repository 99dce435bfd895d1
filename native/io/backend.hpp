// Backends that move bytes between memory and files: one small interface, and its requests.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "native/base/error.hpp"
#include "native/io/file.hpp"

namespace tierstore {

enum class IoBackend { Auto, Uring, Threads, Pmem };  // each has a row of kIoBackends

// Punch returns the blocks of a range, which then reads as zeros.
enum class IoKind { Read, Write, Sync, Punch };

// The urgency of an operation. Demand passes everything queued; the others are served in order of arrival, but Idle work
// of a compute thread only when it has no other, the last queued first.
enum class Priority { Demand, Speculative, WriteBack, Idle };

struct IoResult {
    FailurePtr failure;       // null: every byte was transferred, or the sync succeeded
    uint64_t service_ns = 0;  // from the first chunk's start to the last one's end
    uint64_t continued = 0;   // transfers that ended short and were continued
};

struct IoRequest {
    uint64_t id = 0;
    IoKind kind = IoKind::Read;
    Priority priority = Priority::Demand;
    OpenFilePtr file;
    uint64_t offset = 0;
    std::vector<iovec> parts;  // memory that outlives the request; empty for a sync or punch
    size_t nbytes = 0;         // the parts' sum
    uint64_t hole_bytes = 0;   // of a punch
    // Called once, on one of the backend's threads, with no lock of the backend held. Must not throw.
    std::function<void(const IoResult&)> complete;
};

// Thread-safe. submit() never waits and never calls `complete` itself.
class Backend {
public:
    virtual ~Backend() = default;

    virtual void submit(IoRequest request) = 0;
    // Cancels a request before any of it has started: returns true, and `complete` is never called.
    virtual bool cancel(uint64_t id) = 0;
    // Makes a request that has not started as urgent as a demanded one.
    virtual void promote(uint64_t id) = 0;
    // Waits until every request has completed.
    virtual void drain() = 0;
    // Drains, then joins the threads. Later calls do nothing.
    virtual void close() = 0;
};

struct BackendOptions {
    size_t threads = 4;                // of the threads and pmem backends: chunks in flight
    size_t queue_depth = 32;           // of the uring backend: chunks in flight
    size_t chunk_bytes = 1 << 20;      // larger requests are cut into chunks of this size
    std::vector<int> lease_fds;        // see make_uring_backend
    MapSync map_sync = MapSync::Auto;  // of the pmem backend
};

std::unique_ptr<Backend> make_threads_backend(const BackendOptions& options);

// Throws SyscallError (ENOSYS, EPERM, EMFILE, ENOMEM, ...) if the kernel grants no ring. `lease_fds` are registered in
// the ring: after SIGKILL the kernel tears a ring down asynchronously, and its direct writes may still land; the ring
// holds the locks' open files until then, so that a flock on them cannot pass to another process before. (Blocking
// writes of the threads backend end before the dead process's files are closed.)
std::unique_ptr<Backend> make_uring_backend(const BackendOptions& options);

// Files in memory: threads copy to and from mappings. If a mapping is synchronous, a write is durable when it
// completes, and a sync costs nothing; else a sync is msync. Writes never meet a missing block, which would be a
// SIGBUS: blocks are reserved first, and ENOSPC is an error like any other.
std::unique_ptr<Backend> make_pmem_backend(const BackendOptions& options);

struct KnownBackend {
    const char* name;  // as in configurations; the members of Python's enum are these names in capitals
    IoBackend value;
    std::unique_ptr<Backend> (*make)(const BackendOptions&);  // null for Auto, which chooses
};
inline constexpr KnownBackend kIoBackends[] = {
    {"auto", IoBackend::Auto, nullptr},
    {"uring", IoBackend::Uring, &make_uring_backend},
    {"threads", IoBackend::Threads, &make_threads_backend},
    {"pmem", IoBackend::Pmem, &make_pmem_backend},
};

struct MadeBackend {
    std::unique_ptr<Backend> backend;
    const char* name = "";
    std::string reason;  // why Auto did not choose io_uring; empty otherwise
};

// The backend `asked` for. Auto chooses io_uring, or threads if the kernel grants no ring. Throws SyscallError if the
// requested one is refused, std::invalid_argument for a value that no backend has.
MadeBackend make_backend(IoBackend asked, const BackendOptions& options);

uint64_t monotonic_ns();

}  // namespace tierstore
