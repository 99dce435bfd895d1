#include "native/base/bf16.hpp"

namespace tierstore {

void split(std::uint16_t* __restrict hi, std::int16_t* __restrict lo, const float* __restrict src,
           std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) {
        const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, src[i]);
        hi[i] = split_hi(bits);
        lo[i] = split_lo(bits);
    }
}

void merge(float* __restrict dst, const std::uint16_t* __restrict hi, const std::int16_t* __restrict lo,
           std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) dst[i] = merge(hi[i], lo[i]);
}

}  // namespace tierstore
