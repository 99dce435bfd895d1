#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "native/optim/kernels.hpp"

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

    using I = __m256i;
    static constexpr std::size_t codes_group = 4;

    static I integer(std::uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
    static I lanes() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
    static I as_integers(F x) { return _mm256_castps_si256(x); }
    static F as_floats(I x) { return _mm256_castsi256_ps(x); }
    static I plus(I a, I b) { return _mm256_add_epi32(a, b); }
    static I multiply(I a, I b) { return _mm256_mullo_epi32(a, b); }
    static I bit_and(I a, I b) { return _mm256_and_si256(a, b); }
    static I bit_xor(I a, I b) { return _mm256_xor_si256(a, b); }
    template <int n>
    static I shift_right(I x) {
        return _mm256_srli_epi32(x, n);
    }
    // Of signed integers.
    static I greater(I a, I b) { return _mm256_max_epi32(a, b); }
    static I greater_unsigned(I a, I b) { return _mm256_max_epu32(a, b); }
    // x where a < b, neither negative; else 0.
    static I zero_unless_below(I x, I a, I b) { return _mm256_and_si256(_mm256_cmpgt_epi32(b, a), x); }

    static F load_bf16(const std::uint16_t* p) {
        const I wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
    static void store_upper_halves(std::uint16_t* first, std::uint16_t* second, I a, I b) {
        const I packed = _mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16));
        const I both = _mm256_permute4x64_epi64(packed, 0xd8);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(first), _mm256_castsi256_si128(both));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(second), _mm256_extracti128_si256(both, 1));
    }
    // Half precision whose mantissas have three bits; a sign extends over the exponent's upper bits, which are cleared.
    static F load_codes(const std::uint8_t* p) {
        const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
        return _mm256_cvtph_ps(_mm_slli_epi16(wide, half_shift));
    }
    static F load_signed_codes(const std::uint8_t* p) {
        const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
        const __m128i half =
            _mm_and_si128(_mm_slli_epi16(wide, half_shift), _mm_set1_epi16(static_cast<short>(half_mask)));
        return _mm256_cvtph_ps(half);
    }
    // Codes modulo 256, with the signs of other registers' bits.
    static void store_signed_codes(std::uint8_t* p, const I (&codes)[codes_group],
                                   const I (&bits)[codes_group]) {
        const I signs = _mm256_and_si256(saturated_bytes(bits), _mm256_set1_epi8(static_cast<char>(0x80)));
        store_bytes(p, _mm256_or_si256(low_bytes(codes), signs));
    }
    // Codes modulo 256, but not 0 where other registers' bits are not; those are not negative.
    static void store_codes_not_zero(std::uint8_t* p, const I (&codes)[codes_group],
                                     const I (&bits)[codes_group]) {
        const I least = _mm256_min_epu8(saturated_bytes(bits), _mm256_set1_epi8(1));
        store_bytes(p, _mm256_max_epu8(low_bytes(codes), least));
    }
    // Packing works within 128-bit halves: it leaves fours of bytes in the order 0 2 4 6 | 1 3 5 7.
    static I low_bytes(const I (&x)[codes_group]) {
        const I mask = _mm256_set1_epi16(0xff);
        return _mm256_packus_epi16(_mm256_and_si256(_mm256_packus_epi32(x[0], x[1]), mask),
                                   _mm256_and_si256(_mm256_packus_epi32(x[2], x[3]), mask));
    }
    static I saturated_bytes(const I (&x)[codes_group]) {
        return _mm256_packs_epi16(_mm256_packs_epi32(x[0], x[1]), _mm256_packs_epi32(x[2], x[3]));
    }
    static void store_bytes(std::uint8_t* p, I packed) {
        const I ordered = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), ordered);
    }
    static void store_integers(std::uint32_t* p, I x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
    }
};

constexpr int unroll = 2;

}  // namespace
}  // namespace tierstore::kernels

#include "native/optim/kernels.inl"

namespace tierstore::kernels {
const Kernels avx2 = all;
}
