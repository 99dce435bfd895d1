#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace tierstore::quant_kernels {
namespace {

struct V {
    __m512 v;

    static V set(float x) { return {_mm512_set1_ps(x)}; }
    static V load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static void store(float* p, V x) { _mm512_storeu_ps(p, x.v); }
    static V add(V x, V y) { return {_mm512_add_ps(x.v, y.v)}; }
    static V mul(V x, V y) { return {_mm512_mul_ps(x.v, y.v)}; }
    static __m128i bytes(const std::uint8_t* p) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    }
    static V load_int8(const std::uint8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes(p)))}; }
    static float sum(V x) {
        const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
        const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
    }

    // What the 16 codes of a block stand for: a code picks its lane (its lowest four bits do).
    struct Table {
        __m512 values;
        explicit Table(const float* p) {
            const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            values = _mm512_add_ps(_mm512_mul_ps(codes, _mm512_set1_ps(p[0])), _mm512_set1_ps(p[1]));
        }
        V low(const std::uint8_t* p) const {
            return {_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(bytes(p)), values)};
        }
        V high(const std::uint8_t* p) const {
            return {_mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_cvtepu8_epi32(bytes(p)), 4), values)};
        }
    };
};

constexpr std::size_t tile_rows = 4, tile_outputs = 4;

}  // namespace
}  // namespace tierstore::quant_kernels

#include "native/quant/kernels.inl"

namespace tierstore::quant_kernels {
const Kernels avx512 = all;
}
