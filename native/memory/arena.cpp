#include "native/memory/arena.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "native/base/align.hpp"
#include "native/base/error.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace tierstore {
namespace {

// Populating more memory than is available would start the OOM killer instead of failing: check first.
size_t available_bytes() {
    std::ifstream meminfo("/proc/meminfo");
    std::string key, unit;
    size_t value = 0;
    while (meminfo >> key >> value) {
        std::getline(meminfo, unit);
        if (key == "MemAvailable:") return value * 1024;
    }
    return SIZE_MAX;
}

size_t read_number(const std::string& path) {
    std::ifstream file(path);
    size_t value = SIZE_MAX;  // stays so for "max", and where there is no such file
    if (!(file >> value)) return SIZE_MAX;
    return value;
}

// The tightest memory limit of this process's control groups: beyond it, too, the kernel kills.
size_t cgroup_limit() {
    std::ifstream groups("/proc/self/cgroup");
    std::string line;
    size_t limit = SIZE_MAX;
    while (std::getline(groups, line)) {
        // hierarchy:controllers:path; the unified hierarchy (v2) names no controllers.
        const size_t first = line.find(':');
        const size_t second = line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        const bool unified = controllers.empty();
        if (!unified && controllers != "memory") continue;
        const std::string root = unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
        const std::string name = unified ? "/memory.max" : "/memory.limit_in_bytes";
        std::string path = line.substr(second + 1);
        while (true) {  // an ancestor's limit holds too; in a container only the root may be there
            limit = std::min(limit, read_number(root + path + name));
            const size_t slash = path.rfind('/');
            if (slash == std::string::npos) break;
            path.resize(slash);
        }
    }
    return limit;
}

}  // namespace

Arena::Arena(size_t nbytes, HugePages huge_pages, const std::function<void(size_t)>& progress)
    : nbytes_(nbytes), huge_pages_(huge_pages) {
    if (nbytes == 0) throw std::invalid_argument("an arena has at least 1 byte");
    const std::string what = "an arena of " + std::to_string(nbytes) + " bytes";
    if (nbytes > std::min(available_bytes(), cgroup_limit())) throw SyscallError(ENOMEM, what);
    const size_t usable = round_up(nbytes, kPageBytes);
    reserved_ = usable + kHugePageBytes + 2 * kPageBytes;
    void* base = mmap(nullptr, reserved_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) throw SyscallError(errno, what);
    reservation_ = static_cast<std::byte*>(base);
    const auto first = round_up(reinterpret_cast<uintptr_t>(base) + kPageBytes, kHugePageBytes);
    data_ = reservation_ + (first - reinterpret_cast<uintptr_t>(base));
    try {
        // Mapped afresh without MAP_NORESERVE, so that the kernel accounts for it.
        if (mmap(data_, usable, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
            MAP_FAILED)
            throw SyscallError(errno, what);
        if (huge_pages == HugePages::Off) {
            madvise(data_, usable,
                    MADV_NOHUGEPAGE);  // EINVAL where the kernel has no huge pages: then we get none
        } else if (madvise(data_, usable, MADV_HUGEPAGE) != 0 && huge_pages == HugePages::On) {
            throw SyscallError(errno, "huge pages for " + what);
        }
        populate(progress);
        if (huge_pages == HugePages::On && huge_bytes() == 0)
            throw SyscallError(ENOMEM, "huge pages for " + what + ", the kernel granted none");
    } catch (...) {
        munmap(reservation_, reserved_);
        throw;
    }
}

Arena::Arena(std::shared_ptr<const void> owner, std::byte* data, size_t nbytes)
    : owner_(std::move(owner)), data_(data), nbytes_(nbytes), huge_pages_(HugePages::Off) {}

Arena::~Arena() {
    if (reservation_) munmap(reservation_, reserved_);
}

void Arena::populate(const std::function<void(size_t)>& progress) {
    // A piece at a time: one call for the whole would hold the address space's lock for seconds. On several
    // threads: each page is zeroed, and in a virtual machine often fetched from the host first.
    constexpr size_t kPiece = size_t{64} << 20;
    constexpr size_t kMostThreads = 8;
    const size_t usable = round_up(nbytes_, kPageBytes);
    std::atomic<size_t> next{0}, done{0};
    std::atomic<int> error{0};
    const auto take_pieces = [&](const std::function<void(size_t)>& told) {
        for (size_t at; error == 0 && (at = next.fetch_add(kPiece)) < usable;) {
            const size_t n = std::min(kPiece, usable - at);
            int rc;
            do {
                rc = madvise(data_ + at, n, MADV_POPULATE_WRITE);
            } while (rc != 0 && (errno == EINTR || errno == EAGAIN));
            if (rc != 0 && errno != EINVAL) {
                error = errno;
                return;
            }
            if (rc != 0) {  // before Linux 5.14: touch each page
                for (size_t i = 0; i < n; i += kPageBytes)
                    *static_cast<volatile std::byte*>(data_ + at + i) = std::byte{0};
            }
            done += n;
            if (told) told(std::min<size_t>(done, nbytes_));  // the last page may be larger
        }
    };
    const size_t threads =
        std::min<size_t>({kMostThreads, std::thread::hardware_concurrency(), usable / kPiece});
    {
        std::vector<std::jthread> others;
        while (others.size() + 1 < threads) others.emplace_back(take_pieces, nullptr);
        try {
            take_pieces(progress);
        } catch (...) {
            next = usable;
            throw;
        }
    }
    if (error != 0) throw SyscallError(error, "populating an arena of " + std::to_string(nbytes_) + " bytes");
}

size_t Arena::huge_bytes() const {
    std::ifstream smaps("/proc/self/smaps");
    const auto first = reinterpret_cast<uintptr_t>(data_);
    const auto last = first + nbytes_;
    bool inside = false;
    size_t total = 0;
    std::string line;
    while (std::getline(smaps, line)) {
        unsigned long begin = 0, end = 0, kib = 0;
        if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) {
            inside = begin < last && end > first;
        } else if (inside && std::sscanf(line.c_str(), "AnonHugePages: %lu kB", &kib) == 1) {
            total += kib * 1024;
        }
    }
    return total;
}

}  // namespace tierstore
