// A file opened twice: through the page cache, and past it.
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

// The descriptors of one open file. Operations in flight share them, so that closing a File never pulls a
// descriptor (or a stranger's file that got its number) from under a transfer.
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
    std::string direct_reason;  // why not; empty when there is
    bool direct_required = false;
    size_t memory_alignment = 1;   // of a direct transfer's memory, bytes
    size_t offset_alignment = 1;   // of a direct transfer's offset and length, bytes
    mutable FileMapping mapping;   // of the pmem backend
    std::shared_ptr<Meter> meter;  // of the drive that it lies on; null: nobody asks
};

using OpenFilePtr = std::shared_ptr<const OpenFile>;

class File {
public:
    // Throws SyscallError; with DirectIo::On also where the file system has no direct I/O. With
    // FileAccess::Read the descriptors cannot write, and whatever would fails with EBADF.
    explicit File(std::string path, FileCreate create = FileCreate::No, DirectIo direct = DirectIo::Auto,
                  FileAccess access = FileAccess::ReadWrite, std::shared_ptr<Meter> meter = nullptr);

    const std::string& path() const { return path_; }
    // What an operation keeps. Throws SyscallError (EBADF) once closed.
    OpenFilePtr open() const;

    // Reserves blocks for [offset, offset + nbytes), lengthening the file: a later write there cannot find
    // the disk full. Throws SyscallError, with ENOSPC where they are not to be had; the file is then as long
    // as it was.
    void allocate(uint64_t offset, uint64_t nbytes) const;
    // Gives the blocks of [offset, offset + nbytes) back; they read as zeros. The size stays.
    void punch(uint64_t offset, uint64_t nbytes) const;
    uint64_t size() const;

    // The descriptors close when the last operation in flight has ended. Later calls do nothing.
    void close();
    bool closed() const;

private:
    mutable std::mutex mutex_;
    std::string path_;
    OpenFilePtr open_;
};

}  // namespace tierstore
