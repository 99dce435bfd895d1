#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace tierstore::kernels {
namespace {

struct Vec {
    using F = __m256;
    static constexpr std::size_t width = 8;

    static F set(float x) { return _mm256_set1_ps(x); }
    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F sqrt(F a) { return _mm256_sqrt_ps(a); }

    static F load_split(const std::uint16_t* hi, const std::int16_t* lo) {
        const __m256i h = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(hi)));
        const __m256i l = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(lo)));
        return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(h, 16), l));
    }
    static void store_split(std::uint16_t* hi, std::int16_t* lo, F x) {
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i h = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x8000)), 16);
        const __m256i l = _mm256_and_si256(bits, _mm256_set1_epi32(0xffff));
        // Packing works within 128-bit halves: h0 l0 | h1 l1, put in order by the permutation.
        const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(h, l), 0xd8);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(hi), _mm256_castsi256_si128(both));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(lo), _mm256_extracti128_si256(both, 1));
    }
};

constexpr int unroll = 2;

}  // namespace
}  // namespace tierstore::kernels

#include "native/optim/kernels.inl"

namespace tierstore::kernels {
const Kernels avx2 = all;
}
