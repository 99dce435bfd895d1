// One float at a time, with what every x86-64 has; the compiler may pair them up.
#include <emmintrin.h>

#include <cstddef>
#include <cstdint>

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

    static F load_split(const std::uint16_t* hi, const std::int16_t* lo) {
        return __builtin_bit_cast(
            float, (static_cast<std::uint32_t>(*hi) << 16) + static_cast<std::uint32_t>(std::int32_t{*lo}));
    }
    static void store_split(std::uint16_t* hi, std::int16_t* lo, F x) {
        const auto bits = __builtin_bit_cast(std::uint32_t, x);
        *hi = static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
        *lo = static_cast<std::int16_t>(static_cast<std::uint16_t>(bits));
    }
};

constexpr int unroll = 4;

}  // namespace
}  // namespace tierstore::kernels

#include "native/optim/kernels.inl"

namespace tierstore::kernels {
const Kernels scalar = all;
}
