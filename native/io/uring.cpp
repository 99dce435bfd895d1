#include "native/io/request_queue.hpp"
namespace tierstore {
std::unique_ptr<Backend> make_uring_backend(const BackendOptions&) { throw SyscallError(ENOSYS, "io_uring_setup"); }
}
