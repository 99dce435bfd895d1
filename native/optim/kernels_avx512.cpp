#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "native/optim/kernels.hpp"

namespace tierstore::kernels {
namespace {

struct Vec {
    using F = __m512;
    static constexpr std::size_t width = 16;

    static F set(float x) { return _mm512_set1_ps(x); }
    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F sqrt(F a) { return _mm512_sqrt_ps(a); }

    static F load_split(const std::uint16_t* hi, const std::int16_t* lo) {
        const __m512i h = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(hi)));
        const __m512i l = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(lo)));
        return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(h, 16), l));
    }
    static void store_split(std::uint16_t* hi, std::int16_t* lo, F x) {
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i h = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(hi), _mm512_cvtepi32_epi16(h));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(lo), _mm512_cvtepi32_epi16(bits));
    }

    using I = __m512i;
    static constexpr std::size_t codes_group = 4;

    static I integer(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
    static I lanes() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
    static I as_integers(F x) { return _mm512_castps_si512(x); }
    static F as_floats(I x) { return _mm512_castsi512_ps(x); }
    static I plus(I a, I b) { return _mm512_add_epi32(a, b); }
    static I multiply(I a, I b) { return _mm512_mullo_epi32(a, b); }
    static I bit_and(I a, I b) { return _mm512_and_si512(a, b); }
    static I bit_xor(I a, I b) { return _mm512_xor_si512(a, b); }
    template <int n>
    static I shift_right(I x) {
        return _mm512_srli_epi32(x, n);
    }
    // Of signed integers.
    static I greater(I a, I b) { return _mm512_max_epi32(a, b); }
    static I greater_unsigned(I a, I b) { return _mm512_max_epu32(a, b); }
    // x where a < b, neither negative; else 0.
    static I zero_unless_below(I x, I a, I b) {
        return _mm512_maskz_mov_epi32(_mm512_cmplt_epi32_mask(a, b), x);
    }

    static F load_bf16(const std::uint16_t* p) {
        const I wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
    static void store_upper_halves(std::uint16_t* first, std::uint16_t* second, I a, I b) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(first),
                            _mm512_cvtepi32_epi16(_mm512_srli_epi32(a, 16)));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(second),
                            _mm512_cvtepi32_epi16(_mm512_srli_epi32(b, 16)));
    }
    // Half precision whose mantissas have three bits; a sign extends over the exponent's upper bits, which are cleared.
    static F load_codes(const std::uint8_t* p) {
        const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        return _mm512_cvtph_ps(_mm256_slli_epi16(wide, half_shift));
    }
    static F load_signed_codes(const std::uint8_t* p) {
        const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        const __m256i mask = _mm256_set1_epi16(static_cast<short>(half_mask));
        return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, half_shift), mask));
    }
    // Codes modulo 256, with the signs of other registers' bits.
    static void store_signed_codes(std::uint8_t* p, const I (&codes)[codes_group],
                                   const I (&bits)[codes_group]) {
        constexpr int first_or_both_others = 0xf8;
        for (std::size_t j = 0; j < codes_group; ++j) {
            const I sign = _mm512_srli_epi32(bits[j], 24);
            const I mask = _mm512_set1_epi32(0x80);
            store_bytes(p + j * width, _mm512_ternarylogic_epi32(codes[j], sign, mask, first_or_both_others));
        }
    }
    // Codes modulo 256, but not 0 where other registers' bits are not; those are not negative.
    static void store_codes_not_zero(std::uint8_t* p, const I (&codes)[codes_group],
                                     const I (&bits)[codes_group]) {
        for (std::size_t j = 0; j < codes_group; ++j) {
            const __mmask16 some = _mm512_test_epi32_mask(bits[j], bits[j]);
            const I least = _mm512_set1_epi32(static_cast<int>(code_one));
            store_bytes(p + j * width, _mm512_mask_max_epi32(codes[j], some, codes[j], least));
        }
    }
    static void store_bytes(std::uint8_t* p, I x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
    }
    static void store_integers(std::uint32_t* p, I x) { _mm512_storeu_si512(p, x); }
};

constexpr int unroll = 4;

}  // namespace
}  // namespace tierstore::kernels

#include "native/optim/kernels.inl"

namespace tierstore::kernels {
const Kernels avx512 = all;
}
