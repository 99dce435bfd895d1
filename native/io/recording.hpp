// A backend that logs what was written and synced, in order: crash tests build from the log every state of the disk
// that a power cut could leave.
//
// The log is a sequence of records, integers little-endian:
//
//   u8  event      1 WRITE_SUBMIT, 2 WRITE_DONE, 3 SYNC_SUBMIT, 4 SYNC_DONE, 5 MARK, 6 PUNCH_SUBMIT, 7 PUNCH_DONE
//   u64 id         of the operation (its ticket); 0 for MARK
//   u64 offset     in the file, bytes (WRITE_SUBMIT, PUNCH_SUBMIT; else 0)
//   u32 text_bytes, then that many bytes of UTF-8: the path (a SUBMIT), the mark's text (MARK), or nothing; for a DONE
//                  the error's text, or nothing if it succeeded
//   u64 data_bytes, then that many bytes: what is written (WRITE_SUBMIT), the length of the hole as a u64
//                  (PUNCH_SUBMIT), or nothing
//
// A SUBMIT is logged before the operation reaches the kernel, a DONE after its result is known and before anyone is
// told. So a write with a DONE before a SYNC_SUBMIT of its file, whose SYNC_DONE is before the cut, is durable; any
// other submitted write may be there, or not, or in part. The same holds for a punch.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "native/io/backend.hpp"

namespace tierstore {

class EventLog {
public:
    // Appends to the file at `path`, which is created if missing. Throws SyscallError.
    explicit EventLog(const std::string& path);
    ~EventLog();
    EventLog(const EventLog&) = delete;
    EventLog& operator=(const EventLog&) = delete;

    void mark(const std::string& text);
    void submitted(const IoRequest& request);
    void done(IoKind kind, uint64_t id, const IoResult& result);

private:
    void append(uint8_t event, uint64_t id, uint64_t offset, const std::string& text,
                const std::vector<iovec>& data, size_t nbytes);

    std::string path_;
    int fd_;
    std::mutex mutex_;  // one record at a time
};

// Logs to `log`, and lets `inner` do the work.
std::unique_ptr<Backend> make_recording_backend(std::unique_ptr<Backend> inner,
                                                std::shared_ptr<EventLog> log);

}  // namespace tierstore
