// One page-aligned piece of memory, fully populated from the start.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace tierstore {

enum class HugePages { Off, Auto, On };

// `nbytes` of zeroed anonymous memory at a 2 MiB boundary. The constructor populates every page, so that missing memory
// is a SyscallError (ENOMEM) there, never a signal later. It lies between inaccessible guard pages, so that the kernel
// never merges it with a neighbour and smaps describes it alone. Shared by shared_ptr: it is freed with the last of its
// owner, buffers, views and operations in flight.
class Arena {
public:
    // Takes seconds where a hypervisor fetches the pages from its host. This thread calls `progress` with the bytes that
    // are there after every 64 MiB that it has populated itself; what that throws ends the constructor.
    explicit Arena(size_t nbytes, HugePages huge_pages = HugePages::Auto,
                   const std::function<void(size_t)>& progress = {});
    // Memory of `owner`, which it keeps: a file's mapping, which may be read-only.
    Arena(std::shared_ptr<const void> owner, std::byte* data, size_t nbytes);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    std::byte* data() const { return data_; }
    size_t nbytes() const { return nbytes_; }
    HugePages huge_pages() const { return huge_pages_; }

    // Its bytes that the kernel backs by huge pages now (from /proc/self/smaps).
    size_t huge_bytes() const;

private:
    void populate(const std::function<void(size_t)>& progress);

    std::shared_ptr<const void> owner_;  // null: the memory is its own
    std::byte* reservation_ = nullptr;   // guards and slack included
    size_t reserved_ = 0;
    std::byte* data_ = nullptr;
    size_t nbytes_ = 0;
    HugePages huge_pages_;
};

}  // namespace tierstore
