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

void copy_bytes(void* dst, const void* src, size_t n) {
#ifdef __SSE2__
    if (n >= kStreamFrom) {
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
        _mm_sfence();  // streaming stores are weakly ordered: the lock that publishes the copy does not order them
        std::memcpy(d, s, n);
        return;
    }
#endif
    std::memcpy(dst, src, n);
}

void zero_bytes(void* dst, size_t n) {
#ifdef __SSE2__
    if (n >= kStreamFrom) {
        auto* d = static_cast<char*>(dst);
        const size_t head = (64 - (reinterpret_cast<uintptr_t>(d) & 63)) & 63;
        std::memset(d, 0, head);
        d += head, n -= head;
        const __m128i zero = _mm_setzero_si128();
        for (; n >= 64; n -= 64, d += 64)
            for (int i = 0; i < 64; i += 16) _mm_stream_si128(reinterpret_cast<__m128i*>(d + i), zero);
        _mm_sfence();
        std::memset(d, 0, n);
        return;
    }
#endif
    std::memset(dst, 0, n);
}

}  // namespace tierstore
