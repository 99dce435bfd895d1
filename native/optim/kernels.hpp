// What each instruction set's translation unit offers. Internal to this room.
//
// Those units are compiled for processors that this one may not be, so they must not emit an inline
// function that the linker could pick for everyone: they include no standard library but <cstddef> and
// <cstdint>, and keep what they define in unnamed namespaces.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tierstore::kernels {

// A step's scalars, as the kernel uses them: see adamw.hpp.
struct Scalars {
    float decay, beta1, rest1, beta2, rest2, rate, floor;
};

// A step's key of the hash that rounds narrow moments: see moments.hpp.
struct Key {
    std::uint32_t low, high;
};

struct Step {
    Scalars scalars;
    Key key;
};

struct Sections {
    float* weight;
    std::uint16_t* weight_hi;
    std::int16_t* weight_lo;
    float* exp_avg;
    float* exp_avg_sq;
    const float* grad;
    std::size_t numel;
};

// With moments in bf16. `first`: the first element's index in its record, modulo 2^32.
struct Bf16Sections {
    float* weight;
    std::uint16_t* weight_hi;
    std::int16_t* weight_lo;
    std::uint16_t* exp_avg;
    std::uint16_t* exp_avg_sq;
    const float* grad;
    std::size_t numel;
    std::uint32_t first;
};

// With moments in 8 bits. `first` is a multiple of the block; only the last block may be shorter.
struct Int8Sections {
    float* weight;
    std::uint16_t* weight_hi;
    std::int16_t* weight_lo;
    std::uint8_t* exp_avg;
    std::uint8_t* exp_avg_sq;
    float* exp_avg_scale;
    float* exp_avg_sq_scale;
    const float* grad;
    std::size_t numel;
    std::uint32_t first;
};

// The arithmetic of 8-bit codes, which moments.cpp shares. Of the fp32 bits of a magnitude divided by the scale,
// `max(bits(x + lowest) - bits(lowest), bits(x) - bits(lowest / 2))` is the code with `code_shift` bits of fraction,
// where `lowest` is the smallest value with a full mantissa: the first term is the larger one below it.
inline constexpr std::size_t block_numel = 256;
inline constexpr int code_shift = 19;
inline constexpr std::uint32_t infinity_bits = 0x7f800000u;
inline constexpr std::uint32_t largest_bf16_bits = 0x7f7f0000u;
inline constexpr std::uint32_t exp_avg_lowest = (127u - 6u) << 23;
inline constexpr std::uint32_t exp_avg_sq_lowest = (127u - 14u) << 23;
inline constexpr std::uint32_t exponent_one = 1u << 23;
inline constexpr std::uint32_t least_scale = 127u - 108u, most_scale = 127u + 126u;  // biased exponents
inline constexpr std::uint32_t top_code_rest = (1u << code_shift) - 1u;  // what lies above 1.9375 carries

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
