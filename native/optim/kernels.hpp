// The functions of each instruction set's translation unit. Internal to this directory.
//
// Those units are compiled for processors that this one may not be, so they must not emit an inline function that the
// linker could choose for everyone: they include no standard library but <cstddef> and <cstdint>, and keep their
// definitions in unnamed namespaces.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tierstore::kernels {

// A step's scalars, as the kernel uses them (adamw.hpp).
struct Scalars {
    float decay, beta1, rest1, beta2, rest2, rate, floor;
};

// A step's key for the hash that rounds narrow moments (moments.hpp).
struct Key {
    std::uint32_t low, high;
};

struct Step {
    Scalars scalars;
    Key key;
};

// A section that is absent is null: one of weight and its halves, one or both of the gradients.
struct Sections {
    float* weight;
    std::uint16_t* weight_hi;
    std::int16_t* weight_lo;
    float* exp_avg;
    float* exp_avg_sq;
    const float* grad;
    const std::uint16_t* grad_bf16;
    std::size_t numel;
};

// Sections with moments in bf16. `first`: the first element's index in its record, modulo 2^32.
struct Bf16Sections {
    float* weight;
    std::uint16_t* weight_hi;
    std::int16_t* weight_lo;
    std::uint16_t* exp_avg;
    std::uint16_t* exp_avg_sq;
    const float* grad;
    const std::uint16_t* grad_bf16;
    std::size_t numel;
    std::uint32_t first;
};

// Sections with moments in 8 bits. `first` is a multiple of the block; only the last block may be shorter.
struct Int8Sections {
    float* weight;
    std::uint16_t* weight_hi;
    std::int16_t* weight_lo;
    std::uint8_t* exp_avg;
    std::uint8_t* exp_avg_sq;
    float* exp_avg_scale;
    float* exp_avg_sq_scale;
    const float* grad;
    const std::uint16_t* grad_bf16;
    std::size_t numel;
    std::uint32_t first;
};

// The arithmetic of 8-bit codes, which moments.cpp shares. A code shifted left by `half_shift` (its sign moved to the
// top) is a half-precision number, `..._from_half` times the scale the value: dequantising is a conversion. For
// quantising, a magnitude x in units of which `lowest_bits` is the smallest with a full mantissa (`..._to_lowest` over
// the scale) has max(bits(x + lowest), bits(x) + exponent_one): modulo 2^28 its code, with `code_shift` bits of
// fraction. The first term is the larger one below `lowest`, where mantissas are linear.
inline constexpr std::size_t block_numel = 256;
inline constexpr int code_shift = 20;
inline constexpr int half_shift = code_shift - 13;
inline constexpr unsigned half_mask = 0x8000u | 0x7fu << half_shift;  // for codes with a sign
inline constexpr std::uint32_t random_mask = (1u << code_shift) - 1u;
inline constexpr std::uint32_t infinity_bits = 0x7f800000u;
inline constexpr std::uint32_t largest_bf16_bits = 0x7f7f0000u;
inline constexpr std::uint32_t lowest_bits = 0x40000000u;  // 2: so that code 0 is a multiple of 256
inline constexpr std::uint32_t code_one = (lowest_bits >> code_shift) + 1u;
inline constexpr std::uint32_t exponent_one = 1u << 23;
inline constexpr float exp_avg_from_half = 1.0f, exp_avg_to_lowest = 0x1p15f;
inline constexpr float exp_avg_sq_from_half = 0x1p-15f, exp_avg_sq_to_lowest = 0x1p30f;
inline constexpr std::uint32_t least_scale = 127u - 94u, most_scale = 127u + 110u;  // biased exponents
inline constexpr float most_value = 1.875f * 0x1p110f;
static_assert((code_one - 1u) % 256u == 0u);

struct Kernels {
    void (*adamw)(const Sections&, const Scalars* steps, std::size_t count, float grad_scale);
    void (*adamw_bf16)(const Bf16Sections&, const Step* steps, std::size_t count, float grad_scale);
    void (*adamw_int8)(const Int8Sections&, const Step* steps, std::size_t count, float grad_scale);
    void (*accumulate)(float* dst, const float* src, std::size_t n);
    void (*accumulate_bf16)(float* dst, const std::uint16_t* src, std::size_t n);
    void (*widen_bf16)(float* dst, const std::uint16_t* src, std::size_t n);
    double (*sum_of_squares)(const float* src, std::size_t n);
    bool (*all_finite)(const float* src, std::size_t n);
};

extern const Kernels scalar;
extern const Kernels avx2;
extern const Kernels avx512;

}  // namespace tierstore::kernels
