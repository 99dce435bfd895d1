#include "native/memory/persist.hpp"

#include <cstdint>
#include <cstring>

#include "native/memory/copy.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace tierstore {
namespace {

constexpr size_t kLine = 64;

#if defined(__x86_64__)

__attribute__((target("clwb"))) void write_back(void* line) { _mm_clwb(line); }
__attribute__((target("clflushopt"))) void flush_weakly(void* line) { _mm_clflushopt(line); }
void flush(void* line) { _mm_clflush(line); }

using Flush = void (*)(void*);

Flush choose() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        if ((b & bit_CLWB) != 0) return &write_back;
        if ((b & bit_CLFLUSHOPT) != 0) return &flush_weakly;
    }
    return &flush;
}

void write_back_lines(std::byte* at, size_t n) {
    static const Flush chosen = choose();
    auto line = reinterpret_cast<uintptr_t>(at) & ~uintptr_t{kLine - 1};
    for (; line < reinterpret_cast<uintptr_t>(at) + n; line += kLine) chosen(reinterpret_cast<void*>(line));
}

void fence() { _mm_sfence(); }

constexpr bool kCan = true;

#else

// Without x86-64 no mapping is synchronous: each writer syncs.
void write_back_lines(std::byte*, size_t) {}
void fence() {}
constexpr bool kCan = false;

#endif

}  // namespace

bool can_persist() { return kCan; }

void persist_bytes(void* dst, const void* src, size_t n) {
    auto* to = static_cast<std::byte*>(dst);
    const auto* from = static_cast<const std::byte*>(src);
    const size_t head = (kLine - (reinterpret_cast<uintptr_t>(to) & (kLine - 1))) & (kLine - 1);
    if (n < head + kLine) {
        std::memcpy(to, from, n);
        write_back_lines(to, n);
        fence();
        return;
    }
    const size_t body = (n - head) / kLine * kLine;
    const size_t tail = n - head - body;
    std::memcpy(to, from, head);
    copy_bytes(to + head, from + head, body, Stores::Streaming);
    std::memcpy(to + head + body, from + head + body, tail);
    if (head > 0) write_back_lines(to, head);
    if (tail > 0) write_back_lines(to + head + body, tail);
    fence();
}

}  // namespace tierstore
