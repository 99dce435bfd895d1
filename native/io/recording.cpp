#include "native/io/recording.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

namespace tierstore {
namespace {

enum Event : uint8_t {
    kWriteSubmit = 1,
    kWriteDone = 2,
    kSyncSubmit = 3,
    kSyncDone = 4,
    kMark = 5,
    kPunchSubmit = 6,
    kPunchDone = 7
};

uint8_t done_event(IoKind kind) {
    return kind == IoKind::Write ? kWriteDone : kind == IoKind::Punch ? kPunchDone : kSyncDone;
}

class RecordingBackend final : public Backend {
public:
    RecordingBackend(std::unique_ptr<Backend> inner, std::shared_ptr<EventLog> log)
        : inner_(std::move(inner)), log_(std::move(log)) {}

    void submit(IoRequest request) override {
        if (request.kind != IoKind::Read) {
            log_->submitted(request);
            request.complete = [log = log_, kind = request.kind, id = request.id,
                                complete = std::move(request.complete)](const IoResult& result) {
                log->done(kind, id, result);
                complete(result);
            };
        }
        inner_->submit(std::move(request));
    }
    bool cancel(uint64_t id) override { return inner_->cancel(id); }
    void promote(uint64_t id) override { inner_->promote(id); }
    void drain() override { inner_->drain(); }
    void close() override { inner_->close(); }

private:
    std::unique_ptr<Backend> inner_;
    std::shared_ptr<EventLog> log_;
};

template <class T>
void put(std::string& out, T value) {
    for (size_t i = 0; i < sizeof(T); ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}

}  // namespace

EventLog::EventLog(const std::string& path)
    : path_(path), fd_(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644)) {
    if (fd_ < 0) throw SyscallError(errno, "open", path);
}

EventLog::~EventLog() { ::close(fd_); }

void EventLog::mark(const std::string& text) { append(kMark, 0, 0, text, {}, 0); }

void EventLog::submitted(const IoRequest& request) {
    if (request.kind == IoKind::Punch) {
        std::string length;
        put(length, request.hole_bytes);
        append(kPunchSubmit, request.id, request.offset, request.file->path, {{length.data(), length.size()}},
               length.size());
        return;
    }
    append(request.kind == IoKind::Write ? kWriteSubmit : kSyncSubmit, request.id, request.offset,
           request.file->path, request.parts, request.nbytes);
}

void EventLog::done(IoKind kind, uint64_t id, const IoResult& result) {
    append(done_event(kind), id, 0, result.failure ? result.failure->message() : "", {}, 0);
}

void EventLog::append(uint8_t event, uint64_t id, uint64_t offset, const std::string& text,
                      const std::vector<iovec>& data, size_t nbytes) {
    std::string record;
    record.reserve(29 + text.size() + nbytes);
    put(record, event);
    put(record, id);
    put(record, offset);
    put(record, static_cast<uint32_t>(text.size()));
    record += text;
    put(record, static_cast<uint64_t>(nbytes));
    for (const iovec& part : data) record.append(static_cast<const char*>(part.iov_base), part.iov_len);
    std::lock_guard lock(mutex_);
    for (size_t at = 0; at < record.size();) {
        const ssize_t n = ::write(fd_, record.data() + at, record.size() - at);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            // An incomplete log proves nothing, and an exception thrown in a completion would reach no caller.
            const std::string message = "tierstore: event log " + path_ + ": " + std::strerror(errno) + "\n";
            (void)!::write(2, message.data(), message.size());
            std::abort();
        }
        at += static_cast<size_t>(n);
    }
}

std::unique_ptr<Backend> make_recording_backend(std::unique_ptr<Backend> inner,
                                                std::shared_ptr<EventLog> log) {
    return std::make_unique<RecordingBackend>(std::move(inner), std::move(log));
}

}  // namespace tierstore
