#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace tierstore::quant_kernels {
namespace {

struct V {
    __m256 a, b;  // lanes 0 to 7, 8 to 15

    static V set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    static V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    static void store(float* p, V v) {
        _mm256_storeu_ps(p, v.a);
        _mm256_storeu_ps(p + 8, v.b);
    }
    static V add(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
    static V mul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
    static __m128i bytes(const std::uint8_t* p) {
        return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    }
    static V load_int8(const std::uint8_t* p) {
        return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes(p))),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes(p + 8)))};
    }
    static float sum(V v) {
        const __m256 eight = _mm256_add_ps(v.a, v.b);
        const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
    }

    // A table of 16 is two registers' too many: the same arithmetic, value by value.
    struct Table {
        __m256 scale, least;
        explicit Table(const float* p) : scale(_mm256_set1_ps(p[0])), least(_mm256_set1_ps(p[1])) {}
        __m256 values(__m256i codes) const {
            return _mm256_add_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(codes), scale), least);
        }
        V low(const std::uint8_t* p) const {
            const __m256i mask = _mm256_set1_epi32(15);
            return {values(_mm256_and_si256(_mm256_cvtepu8_epi32(bytes(p)), mask)),
                    values(_mm256_and_si256(_mm256_cvtepu8_epi32(bytes(p + 8)), mask))};
        }
        V high(const std::uint8_t* p) const {
            return {values(_mm256_srli_epi32(_mm256_cvtepu8_epi32(bytes(p)), 4)),
                    values(_mm256_srli_epi32(_mm256_cvtepu8_epi32(bytes(p + 8)), 4))};
        }
    };
};

// Sixteen registers: four sums of two, and their operands.
constexpr std::size_t tile_rows = 2, tile_outputs = 2;

}  // namespace
}  // namespace tierstore::quant_kernels

#include "native/quant/kernels.inl"

namespace tierstore::quant_kernels {
const Kernels avx2 = all;
}
