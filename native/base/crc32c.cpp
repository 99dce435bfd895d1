// Bits are reflected throughout: bit 31 of a 32-bit remainder is the coefficient of x^0, and the first bit of the
// message (bit 0 of its first byte) has the highest degree.
//
// The wide paths fold (Gopal et al., "Fast CRC computation for generic polynomials using PCLMULQDQ"): each
// 128-bit lane of the state is multiplied by x^distance modulo P and added to the block that lies that far on. A
// carry-less product of a 64-bit half and a 32-bit constant c, read as a reflected 128-bit polynomial, is their
// product times x^33; so the constants are x^(distance + 64 - 33) for a lane's first half (whose degree is 64 higher)
// and x^(distance - 33) for its second. What is left is congruent to the message, so the crc32 instruction takes it
// like any other bytes.
#include "native/base/crc32c.hpp"

#include <immintrin.h>

#include <array>
#include <cstring>

#include "native/base/cpu.hpp"

namespace tierstore {
namespace {

constexpr std::uint32_t polynomial = 0x82F63B78u;  // P, reflected, without x^32
constexpr std::uint32_t one = 0x80000000u;         // x^0

constexpr std::uint32_t times_x(std::uint32_t a) { return (a >> 1) ^ ((a & 1u) != 0 ? polynomial : 0u); }

constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
    std::uint32_t product = 0;
    for (std::uint32_t bit = one; bit != 0; bit >>= 1) {
        if ((a & bit) != 0) product ^= b;
        b = times_x(b);
    }
    return product;
}

constexpr std::uint32_t x_to_the(std::uint64_t n) {
    std::uint32_t result = one, power = times_x(one);
    for (; n != 0; n >>= 1) {
        if ((n & 1u) != 0) result = multiply(result, power);
        power = multiply(power, power);
    }
    return result;
}

constexpr auto make_tables() {
    std::array<std::array<std::uint32_t, 256>, 8> tables{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = times_x(crc);
        tables[0][byte] = crc;
    }
    for (std::size_t k = 1; k < 8; ++k) {
        for (std::uint32_t byte = 0; byte < 256; ++byte) {
            const std::uint32_t crc = tables[k - 1][byte];
            tables[k][byte] = (crc >> 8) ^ tables[0][crc & 0xff];
        }
    }
    return tables;
}
constexpr auto tables = make_tables();

std::uint64_t load64(const std::uint8_t* p) {
    std::uint64_t value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

// These three take and give the raw remainder, without the inversions at either end.

std::uint32_t by_tables(const std::uint8_t* p, std::size_t n, std::uint32_t crc) {
    for (; n >= 8; p += 8, n -= 8) {
        const std::uint64_t w = load64(p) ^ crc;
        crc = tables[7][w & 0xff] ^ tables[6][(w >> 8) & 0xff] ^ tables[5][(w >> 16) & 0xff] ^
              tables[4][(w >> 24) & 0xff] ^ tables[3][(w >> 32) & 0xff] ^ tables[2][(w >> 40) & 0xff] ^
              tables[1][(w >> 48) & 0xff] ^ tables[0][w >> 56];
    }
    for (; n != 0; ++p, --n) crc = (crc >> 8) ^ tables[0][(crc ^ *p) & 0xff];
    return crc;
}

__attribute__((target("sse4.2"))) std::uint32_t by_instruction(const std::uint8_t* p, std::size_t n,
                                                                std::uint32_t crc) {
    std::uint64_t wide = crc;
    for (; n >= 8; p += 8, n -= 8) wide = _mm_crc32_u64(wide, load64(p));
    crc = static_cast<std::uint32_t>(wide);
    for (; n != 0; ++p, --n) crc = _mm_crc32_u8(crc, *p);
    return crc;
}

constexpr std::uint32_t first_half(std::uint64_t distance_bits) { return x_to_the(distance_bits + 64 - 33); }
constexpr std::uint32_t second_half(std::uint64_t distance_bits) { return x_to_the(distance_bits - 33); }

__attribute__((target("sse4.2,pclmul"))) std::uint32_t by_pclmul(const std::uint8_t* p, std::size_t n,
                                                                  std::uint32_t crc) {
    constexpr std::size_t lanes = 8, stride = lanes * 16;
    if (n < 2 * stride) return by_instruction(p, n, crc);
    constexpr std::uint32_t k1 = first_half(stride * 8), k2 = second_half(stride * 8);
    const __m128i k = _mm_set_epi64x(k2, k1);
    __m128i state[lanes];
    for (std::size_t i = 0; i < lanes; ++i) {
        state[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * i));
    }
    state[0] = _mm_xor_si128(state[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
    for (p += stride, n -= stride; n >= stride; p += stride, n -= stride) {
        for (std::size_t i = 0; i < lanes; ++i) {
            const __m128i next = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * i));
            state[i] = _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(state[i], k, 0x00), next),
                                     _mm_clmulepi64_si128(state[i], k, 0x11));
        }
    }
    std::uint8_t rest[stride];
    for (std::size_t i = 0; i < lanes; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(rest + 16 * i), state[i]);
    return by_instruction(p, n, by_instruction(rest, stride, 0));
}

__attribute__((target("sse4.2,pclmul,avx512f,avx512vl,vpclmulqdq"))) std::uint32_t by_vpclmul(
    const std::uint8_t* p, std::size_t n, std::uint32_t crc) {
    constexpr std::size_t lanes = 4, stride = lanes * 64;
    if (n < 2 * stride) return by_pclmul(p, n, crc);
    constexpr std::uint32_t k1 = first_half(stride * 8), k2 = second_half(stride * 8);
    const __m512i k = _mm512_set_epi64(k2, k1, k2, k1, k2, k1, k2, k1);
    __m512i state[lanes];
    for (std::size_t i = 0; i < lanes; ++i) state[i] = _mm512_loadu_si512(p + 64 * i);
    state[0] = _mm512_xor_si512(state[0],
                                _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
    for (p += stride, n -= stride; n >= stride; p += stride, n -= stride) {
        for (std::size_t i = 0; i < lanes; ++i) {
            // 0x96 is the exclusive or of all three.
            state[i] = _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(state[i], k, 0x00),
                                                 _mm512_clmulepi64_epi128(state[i], k, 0x11),
                                                 _mm512_loadu_si512(p + 64 * i), 0x96);
        }
    }
    std::uint8_t rest[stride];
    for (std::size_t i = 0; i < lanes; ++i) _mm512_storeu_si512(rest + 64 * i, state[i]);
    return by_instruction(p, n, by_instruction(rest, stride, 0));
}

struct Method {
    std::uint32_t (*update)(const std::uint8_t*, std::size_t, std::uint32_t);
    const char* name;
};

Method choose() {
    const InstructionSet isa = best_instruction_set();
    if (isa == InstructionSet::Avx512 && supports_vpclmul()) return {by_vpclmul, "vpclmul"};
    if (isa != InstructionSet::Scalar && supports_pclmul()) return {by_pclmul, "pclmul"};
    return {by_tables, "scalar"};
}

const Method& method() {
    static const Method chosen = choose();
    return chosen;
}

}  // namespace

std::uint32_t crc32c(const void* data, std::size_t n, std::uint32_t crc) {
    return ~method().update(static_cast<const std::uint8_t*>(data), n, ~crc);
}

std::uint32_t crc32c_scalar(const void* data, std::size_t n, std::uint32_t crc) {
    return ~by_tables(static_cast<const std::uint8_t*>(data), n, ~crc);
}

std::uint32_t crc32c_combine(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t len_b) {
    // The inversions at either end cancel. x^(8 len) as (x^len)^8, so that the count of bits cannot overflow.
    std::uint32_t shift = x_to_the(len_b);
    for (int i = 0; i < 3; ++i) shift = multiply(shift, shift);
    return multiply(crc_a, shift) ^ crc_b;
}

const char* crc32c_method() { return method().name; }

}  // namespace tierstore
