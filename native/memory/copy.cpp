#include "native/memory/copy.hpp"

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace tierstore {
namespace {

constexpr size_t kStreamFrom = size_t{1} << 20;

}  // namespace

Stores stores_for(size_t total) { return total < kStreamFrom ? Stores::Cached : Stores::Streaming; }

void copy_bytes(void* dst, const void* src, size_t n, [[maybe_unused]] Stores stores) {
#ifdef __SSE2__
    if (stores == Stores::Streaming && n >= 64) {
        auto* d = static_cast<char*>(dst);
        const auto* s = static_cast<const char*>(src);
        const size_t head = (64 - (reinterpret_cast<uintptr_t>(d) & 63)) & 63;
        std::memcpy(d, s, head);
        d += head, s += head, n -= head;
        for (; n >= 64; n -= 64, d += 64, s += 64) {
            const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(s));
            const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(s + 16));
            const __m128i c = _mm_loadu_si128(reinterpret_cast<const __m128i*>(s + 32));
            const __m128i e = _mm_loadu_si128(reinterpret_cast<const __m128i*>(s + 48));
            _mm_stream_si128(reinterpret_cast<__m128i*>(d), a);
            _mm_stream_si128(reinterpret_cast<__m128i*>(d + 16), b);
            _mm_stream_si128(reinterpret_cast<__m128i*>(d + 32), c);
            _mm_stream_si128(reinterpret_cast<__m128i*>(d + 48), e);
        }
        _mm_sfence();  // streaming stores are weakly ordered: the lock that publishes the copy does not order
                       // them
        std::memcpy(d, s, n);
        return;
    }
#endif
    std::memcpy(dst, src, n);
}

}  // namespace tierstore
