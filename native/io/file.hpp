// A file opened twice: through the page cache, and bypassing it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "native/io/mapping.hpp"
#include "native/io/meter.hpp"

namespace tierstore {

enum class FileCreate { No, Yes };
enum class DirectIo { Off, Auto, On };

// The descriptors of one open file. Operations in flight share them, so that closing a File never closes a descriptor
// (or another file that got its number) during a transfer.
struct OpenFile {
    OpenFile(std::string path, FileCreate create, DirectIo direct, FileAccess access,
             std::shared_ptr<Meter> meter);
    ~OpenFile();
    OpenFile(const OpenFile&) = delete;
    OpenFile& operator=(const OpenFile&) = delete;

    std::string path;
    FileAccess access;
    int buffered_fd = -1;
    int direct_fd = -1;         // -1: no direct I/O
    std::string direct_reason;  // why not; empty if there is
    bool direct_required = false;
    size_t memory_alignment = 1;   // of a direct transfer's memory, bytes
    size_t offset_alignment = 1;   // of a direct transfer's offset and length, bytes
    mutable FileMapping mapping;   // of the pmem backend
    mutable FileMapping leased;    // read-only, where readers compute with the file's bytes
    std::shared_ptr<Meter> meter;  // of its drive; null: not measured
};

using OpenFilePtr = std::shared_ptr<const OpenFile>;

class File {
public:
    // Throws SyscallError; with DirectIo::On also if the file system has no direct I/O. With FileAccess::Read the
    // descriptors cannot write, and writing operations fail with EBADF.
    explicit File(std::string path, FileCreate create = FileCreate::No, DirectIo direct = DirectIo::Auto,
                  FileAccess access = FileAccess::ReadWrite, std::shared_ptr<Meter> meter = nullptr);

    const std::string& path() const { return path_; }
    // The descriptors, for an operation to keep. Throws SyscallError (EBADF) once closed.
    OpenFilePtr open() const;

    // Reserves blocks for [offset, offset + nbytes), lengthening the file, so that a later write there cannot run out
    // of disk space. Throws SyscallError, with ENOSPC if there is no space; the file then keeps its length.
    void allocate(uint64_t offset, uint64_t nbytes) const;
    // Returns the blocks of [offset, offset + nbytes) to the file system; they read as zeros. The size stays.
    void punch(uint64_t offset, uint64_t nbytes) const;
    uint64_t size() const;

    // The descriptors are closed when the last operation in flight has ended. Later calls do nothing.
    void close();
    bool closed() const;

private:
    mutable std::mutex mutex_;
    std::string path_;
    OpenFilePtr open_;
};

}  // namespace tierstore
