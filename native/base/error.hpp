// Errors of native code as values: an operation keeps its failure, and every waiter gets a copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <variant>

namespace tierstore {

// A failed system call, or a transfer that ended too early. In Python it is OSError(err, message, path), with
// `file_offset` if a transfer failed.
struct SyscallError : std::runtime_error {
    SyscallError(int err_, std::string operation_, std::string path_ = {})
        : std::runtime_error(operation_ + ": " + std::generic_category().message(err_) +
                             (path_.empty() ? "" : ": " + path_)),
          err(err_),
          operation(std::move(operation_)),
          path(std::move(path_)) {}

    int err;
    std::string operation;
    std::string path;
    int64_t file_offset = -1;  // where in the file a transfer failed
};

// A section read from a file is not what was written there.
struct ChecksumMismatch : std::runtime_error {
    ChecksumMismatch(std::string path_, uint64_t file_offset_, size_t section_index_, uint32_t expected_,
                     uint32_t actual_)
        : std::runtime_error("section " + std::to_string(section_index_) + " at offset " +
                             std::to_string(file_offset_) + " of " + path_ + ": its crc32c is " +
                             std::to_string(actual_) + ", expected " + std::to_string(expected_)),
          path(std::move(path_)),
          file_offset(file_offset_),
          section_index(section_index_),
          expected(expected_),
          actual(actual_) {}

    std::string path;
    uint64_t file_offset;  // bytes, where the section starts
    size_t section_index;  // within its transfer
    uint32_t expected;
    uint32_t actual;
};

struct Cancelled : std::runtime_error {
    Cancelled() : std::runtime_error("the operation was cancelled before it started") {}
};

struct EngineClosed : std::runtime_error {
    EngineClosed() : std::runtime_error("the engine is closed") {}
};

// The failure is too old for its error to be kept, or so old that nothing records whether the operation failed.
struct ResultForgotten : std::runtime_error {
    ResultForgotten()
        : std::runtime_error("the result of an old operation is no longer known: many have failed since") {}
};

// A failure shared by an operation and all that depend on it. Each waiter throws its own copy: an exception object
// rethrown in several threads would be shared mutable state.
class Failure {
public:
    using Error = std::variant<SyscallError, ChecksumMismatch, Cancelled, EngineClosed, ResultForgotten,
                               std::runtime_error>;

    explicit Failure(Error error) : error_(std::move(error)) {}

    [[noreturn]] void raise() const {
        std::visit([](const auto& error) { throw error; }, error_);
        std::abort();  // not reached: every alternative throws
    }

    std::string message() const {
        return std::visit([](const auto& error) { return std::string(error.what()); }, error_);
    }

private:
    Error error_;
};

using FailurePtr = std::shared_ptr<const Failure>;  // null = no failure

inline FailurePtr make_failure(Failure::Error error) {
    return std::make_shared<const Failure>(std::move(error));
}

// The exception being handled, as a value. Call only inside a catch block.
inline FailurePtr current_failure() {
    try {
        throw;
    } catch (const SyscallError& error) {
        return make_failure(error);
    } catch (const ChecksumMismatch& error) {
        return make_failure(error);
    } catch (const Cancelled& error) {
        return make_failure(error);
    } catch (const EngineClosed& error) {
        return make_failure(error);
    } catch (const std::exception& error) {
        return make_failure(std::runtime_error(error.what()));
    } catch (...) {
        return make_failure(std::runtime_error("unknown native error"));
    }
}

}  // namespace tierstore
