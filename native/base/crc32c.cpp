// Bits are reflected throughout: bit 31 of a 32-bit remainder is the coefficient of x^0, and the first
// bit of the message (bit 0 of its first byte) has the highest degree.
//
// A carry-less product of two reflected polynomials, read as a reflected one of twice the width, is their
// product times x (a product of n-bit and n-bit numbers has 2n - 1 bits). Hence the odd constants below.
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

// Three checksums at once, for the crc32 instruction has a latency of three cycles and a throughput of
// one. They are joined as in crc32c_combine: what precedes n bytes is multiplied by x^(8 n). The product
// of a checksum and x^(8 n - 33), times the x above, times the x^32 with which crc32 takes 64 bits in,
// comes to just that.
__attribute__((target("sse4.2,pclmul"))) std::uint32_t by_three(const std::uint8_t* p, std::size_t n,
                                                                std::uint32_t crc) {
    constexpr std::size_t third = 256;  // much farther apart, three streams are not prefetched well
    constexpr std::uint32_t past_one = x_to_the(8 * third - 33), past_two = x_to_the(8 * 2 * third - 33);
    for (; n >= 3 * third; p += 3 * third, n -= 3 * third) {
        std::uint64_t a = crc, b = 0, c = 0;
        for (std::size_t i = 0; i < third; i += 8) {
            a = _mm_crc32_u64(a, load64(p + i));
            b = _mm_crc32_u64(b, load64(p + third + i));
            c = _mm_crc32_u64(c, load64(p + 2 * third + i));
        }
        const __m128i moved_a = _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<std::int64_t>(a)),
                                                     _mm_cvtsi32_si128(static_cast<int>(past_two)), 0);
        const __m128i moved_b = _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<std::int64_t>(b)),
                                                     _mm_cvtsi32_si128(static_cast<int>(past_one)), 0);
        const std::int64_t moved = _mm_cvtsi128_si64(_mm_xor_si128(moved_a, moved_b));
        crc = static_cast<std::uint32_t>(_mm_crc32_u64(0, static_cast<std::uint64_t>(moved)) ^ c);
    }
    return by_instruction(p, n, crc);
}

// Folding (Gopal et al., "Fast CRC computation for generic polynomials using PCLMULQDQ"): each 128-bit
// lane of the state is multiplied by x^distance modulo P and added to the block that lies that far on. A
// 32-bit constant in a 64-bit half stands for itself times x^32, and the product brings one x more: so
// the constants are x^(distance + 64 - 33) for a lane's first half, whose degree is 64 higher, and
// x^(distance - 33) for its second. What is left is congruent to the message, so the crc32 instruction
// takes it like any other bytes.
__attribute__((target("sse4.2,pclmul,avx512f,avx512vl,vpclmulqdq"))) std::uint32_t by_vpclmul(
    const std::uint8_t* p, std::size_t n, std::uint32_t crc) {
    constexpr std::size_t lanes = 4, stride = lanes * 64;
    if (n < 2 * stride) return by_instruction(p, n, crc);
    constexpr std::uint32_t k1 = x_to_the(8 * stride + 64 - 33), k2 = x_to_the(8 * stride - 33);
    const __m512i k = _mm512_set_epi64(k2, k1, k2, k1, k2, k1, k2, k1);
    __m512i state[lanes];
    for (std::size_t i = 0; i < lanes; ++i) state[i] = _mm512_loadu_si512(p + 64 * i);
    state[0] = _mm512_xor_si512(state[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
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
    if (isa != InstructionSet::Scalar && supports_pclmul()) return {by_three, "sse4.2"};
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
    // The inversions at either end cancel. x^(8 len) as (x^len)^8, so that the count of bits cannot
    // overflow.
    std::uint32_t shift = x_to_the(len_b);
    for (int i = 0; i < 3; ++i) shift = multiply(shift, shift);
    return multiply(crc_a, shift) ^ crc_b;
}

const char* crc32c_method() { return method().name; }

}  // namespace tierstore
