// One page-aligned piece of memory whose pages are all there from the start.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tierstore {

enum class HugePages { Off, Auto, On };

// `nbytes` of zeroed anonymous memory at a 2 MiB boundary. Every page is populated by the constructor, so
// that memory that is not to be had is a SyscallError (ENOMEM) there, never a signal later. Between
// inaccessible guard pages: a kernel never merges it with a neighbour, so what smaps says of it is said of it
// alone. Shared by shared_ptr: it goes when the last of its owner, buffers, views and operations in flight
// has gone.
class Arena {
public:
    explicit Arena(size_t nbytes, HugePages huge_pages = HugePages::Auto);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    std::byte* data() const { return data_; }
    size_t nbytes() const { return nbytes_; }
    HugePages huge_pages() const { return huge_pages_; }

    // Bytes of it that the kernel backs by huge pages now (from /proc/self/smaps).
    size_t huge_bytes() const;

private:
    void populate();

    std::byte* reservation_ = nullptr;  // guards and slack included
    size_t reserved_ = 0;
    std::byte* data_ = nullptr;
    size_t nbytes_ = 0;
    HugePages huge_pages_;
};

}  // namespace tierstore
