// One float at a time, with what every x86-64 has; the compiler may pair them up.
#include <emmintrin.h>

#include <cstddef>
#include <cstdint>

#include "native/base/bf16.hpp"

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
};

constexpr int unroll = 4;

}  // namespace
}  // namespace tierstore::kernels

#include "native/optim/kernels.inl"

namespace tierstore::kernels {
const Kernels scalar = all;
}
