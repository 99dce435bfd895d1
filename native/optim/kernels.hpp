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

struct Sections {
    float* weight;
    std::uint16_t* weight_hi;
    std::int16_t* weight_lo;
    float* exp_avg;
    float* exp_avg_sq;
    const float* grad;
    std::size_t numel;
};

struct Kernels {
    void (*adamw)(const Sections&, const Scalars* steps, std::size_t count, float grad_scale);
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
