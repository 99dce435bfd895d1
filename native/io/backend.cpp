// Makes the backend that a caller asks for, from the table in backend.hpp.
#include "native/io/backend.hpp"

#include <stdexcept>
#include <string>

namespace tierstore {

MadeBackend make_backend(IoBackend asked, const BackendOptions& options) {
    if (asked == IoBackend::Auto) {
        try {
            return make_backend(IoBackend::Uring, options);
        } catch (const SyscallError& error) {
            MadeBackend made = make_backend(IoBackend::Threads, options);
            made.reason = error.what();
            return made;
        }
    }
    for (const KnownBackend& known : kIoBackends)
        if (known.value == asked) return {known.make(options), known.name, ""};
    throw std::invalid_argument("unknown I/O backend " + std::to_string(static_cast<int>(asked)));
}

}  // namespace tierstore
