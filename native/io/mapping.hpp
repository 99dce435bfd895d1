// Files in memory: for persistent memory behind a DAX file system, whose bytes the processor reads and writes directly,
// and for any other file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

namespace tierstore {

// Whether stores are durable once they have left the processor's caches (MAP_SYNC on a DAX file system), without a
// system call. Auto: if available; otherwise a sync makes them durable.
enum class MapSync { Off, Auto, On };
enum class FileAccess { ReadWrite, Read };

// A whole file as it was when it was mapped.
class Mapped {
public:
    // Throws SyscallError; with MapSync::On also if the file system has no MAP_SYNC.
    Mapped(int fd, const std::string& path, size_t nbytes, MapSync wanted, FileAccess access);
    ~Mapped();
    Mapped(const Mapped&) = delete;
    Mapped& operator=(const Mapped&) = delete;

    std::byte* data() const { return data_; }
    size_t size() const { return size_; }
    bool synchronous() const { return reason_.empty(); }
    // Why stores need a sync; empty if they do not.
    const std::string& reason() const { return reason_; }
    // Makes stores durable; returns 0 or an errno. `grown`: the file has become longer since the last sync.
    int sync(int fd, bool grown) const;

private:
    std::byte* data_ = nullptr;
    size_t size_;
    std::string reason_;
};

using MappedPtr = std::shared_ptr<const Mapped>;

enum class Touch { Read, Write };
// Touches the pages of mapped bytes beforehand, where a drive's error or a file that was cut short is an errno; met by a
// load or store it would be a SIGBUS. Returns 0 or the errno. (Kernels before 5.14 cannot: there it stays a signal.)
int populate_pages(const std::byte* at, size_t nbytes, Touch touch);

// The mapping of one open file, replaced when the file has grown; users keep the one that they have.
class FileMapping {
public:
    // A mapping that holds [0, end); null if the file is shorter (it is not lengthened). Throws SyscallError.
    MappedPtr covering(int fd, const std::string& path, uint64_t end, MapSync wanted, FileAccess access);
    // The mapping, or null; and whether the file has been mapped longer since the last call.
    MappedPtr for_sync(bool& grown);

private:
    std::mutex mutex_;
    MappedPtr mapped_;
    bool grown_ = false;
};

}  // namespace tierstore
