// Makes the I/O backends: the one place that knows them all.
#include <stdexcept>
#include <string>

#include "native/io/backend.hpp"

namespace tierstore {
namespace {

MadeBackend make_uring_or_threads(const BackendOptions& options) {
    try {
        return make_backend(IoBackend::Uring, options);
    } catch (const SyscallError& error) {
        MadeBackend made = make_backend(IoBackend::Threads, options);
        made.reason = error.what();
        return made;
    }
}

}  // namespace

MadeBackend make_backend(IoBackend asked, const BackendOptions& options) {
    switch (asked) {  // without a default: the compiler names a backend that is missing here
        case IoBackend::Auto: return make_uring_or_threads(options);
        case IoBackend::Uring: return {make_uring_backend(options), "uring", ""};
        case IoBackend::Threads: return {make_threads_backend(options), "threads", ""};
        case IoBackend::Pmem: return {make_pmem_backend(options), "pmem", ""};
    }
    throw std::invalid_argument("unknown I/O backend " + std::to_string(static_cast<int>(asked)));
}

}  // namespace tierstore
