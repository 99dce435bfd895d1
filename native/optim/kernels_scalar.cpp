// One float at a time, with what every x86-64 has; the compiler may pair them up.
#include <emmintrin.h>

#include <cstddef>
#include <cstdint>

#include "native/base/bf16.hpp"
#include "native/optim/kernels.hpp"

namespace tierstore::kernels {
namespace {

struct Vec {
    using F = float;
    static constexpr std::size_t width = 1;

    static F set(float x) { return x; }
    static F load(const float* p) { return *p; }
    static void store(float* p, F x) { *p = x; }
    static F add(F a, F b) { return a + b; }
    static F sub(F a, F b) { return a - b; }
    static F mul(F a, F b) { return a * b; }
    static F div(F a, F b) { return a / b; }
    static F sqrt(F a) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(a))); }

    static F load_split(const std::uint16_t* hi, const std::int16_t* lo) { return merge(*hi, *lo); }
    static void store_split(std::uint16_t* hi, std::int16_t* lo, F x) {
        const auto bits = __builtin_bit_cast(std::uint32_t, x);
        *hi = split_hi(bits);
        *lo = split_lo(bits);
    }

    using I = std::uint32_t;
    static constexpr std::size_t codes_group = 4;

    static I integer(std::uint32_t x) { return x; }
    static I lanes() { return 0; }
    static I as_integers(F x) { return __builtin_bit_cast(I, x); }
    static F as_floats(I x) { return __builtin_bit_cast(F, x); }
    static I plus(I a, I b) { return a + b; }
    static I multiply(I a, I b) { return a * b; }
    static I bit_and(I a, I b) { return a & b; }
    static I bit_xor(I a, I b) { return a ^ b; }
    template <int n>
    static I shift_right(I x) {
        return x >> n;
    }
    // Of signed integers.
    static I greater(I a, I b) { return static_cast<std::int32_t>(a) > static_cast<std::int32_t>(b) ? a : b; }
    static I greater_unsigned(I a, I b) { return a > b ? a : b; }
    static I lesser(I a, I b) { return static_cast<std::int32_t>(a) < static_cast<std::int32_t>(b) ? a : b; }
    // x where a < b, neither negative; else 0.
    static I zero_unless_below(I x, I a, I b) { return a < b ? x : 0; }

    static F load_bf16(const std::uint16_t* p) { return as_floats(static_cast<I>(*p) << 16); }
    static void store_upper_halves(std::uint16_t* first, std::uint16_t* second, I a, I b) {
        *first = static_cast<std::uint16_t>(a >> 16);
        *second = static_cast<std::uint16_t>(b >> 16);
    }
    // A code as half precision has it: a subnormal's mantissa is linear, and the lesser term.
    static F load_codes(const std::uint8_t* p) { return from_code(*p); }
    static F load_signed_codes(const std::uint8_t* p) {
        const I sign = static_cast<I>(*p & 0x80u) << 24;
        return as_floats(as_integers(from_code(*p & 0x7fu)) | sign);
    }
    static F from_code(I code) {
        const I bits = (code << code_shift) + lowest_bits;
        const F linear = as_floats(bits) - as_floats(lowest_bits), floating = as_floats(bits - exponent_one);
        return as_floats(lesser(as_integers(linear), as_integers(floating))) * 0x1p-15f;
    }
    // Codes modulo 256, with the signs of other registers' bits.
    static void store_signed_codes(std::uint8_t* p, const I (&codes)[codes_group],
                                   const I (&bits)[codes_group]) {
        for (std::size_t j = 0; j < codes_group; ++j) {
            p[j] = static_cast<std::uint8_t>(codes[j] | (bits[j] >> 24 & 0x80u));
        }
    }
    // Codes modulo 256, but not 0 where other registers' bits are not; those are not negative.
    static void store_codes_not_zero(std::uint8_t* p, const I (&codes)[codes_group],
                                     const I (&bits)[codes_group]) {
        for (std::size_t j = 0; j < codes_group; ++j) {
            p[j] = static_cast<std::uint8_t>(bits[j] != 0 && codes[j] < code_one ? code_one : codes[j]);
        }
    }
    static void store_integers(std::uint32_t* p, I x) { *p = x; }
};

constexpr int unroll = 4;

}  // namespace
}  // namespace tierstore::kernels

#include "native/optim/kernels.inl"

namespace tierstore::kernels {
const Kernels scalar = all;
}
