// AdamW on the sections of a record, and the sums that gradients need. The same bits on every instruction set.
//
// torch.optim.AdamW's formula (decoupled weight decay, Loshchilov and Hutter 2019), arranged as at the end of section
// 2 of Kingma and Ba 2015, so that a step costs one square root and one division:
//
//     p  = p * decay                                  decay = 1 - lr * weight_decay
//     m  = m * beta1 + rest1 * g                      rest1 = 1 - beta1
//     v  = v * beta2 + (rest2 * g) * g                rest2 = 1 - beta2
//     p  = p - (rate * m) / (sqrt(v) + floor)         rate  = lr * bias_correction2_sqrt / bias_correction1
//                                                     floor = eps * bias_correction2_sqrt
//
// The scalars on the right are computed in double and rounded once to fp32; everything else is fp32, with every
// operation rounded separately (no FMA, no approximations). A NaN stays a NaN everywhere, but its payload is not
// defined.
//
// Narrow moments (moments.hpp) are fp32 within a step: the weight is updated with m and v as above, before they are
// rounded. Rounding m and v first would double the noise of a step and save nothing.
//
// Subnormals count as zero, in and out (FTZ and DAZ, set for the call only): moments that decay through many missed
// steps become subnormal, where a processor may take a hundred times longer. They are below 1.2e-38, and the square
// root of such an exp_avg_sq below 1.1e-19, far below any eps in use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "native/base/cpu.hpp"
#include "native/optim/moments.hpp"

namespace tierstore {

// One step's numbers, as 7 consecutive fp32 values. bias_correction1 = 1 - beta1^t; bias_correction2_sqrt =
// sqrt(1 - beta2^t); t counts from 1. 1 - beta is computed from the shortest decimal that names the fp32 beta (0.999
// rather than 0.99900001287), as torch computes it from the double: fp32 would lose five of its digits.
struct AdamWStep {
    float lr, beta1, beta2, eps, weight_decay, bias_correction1, bias_correction2_sqrt;
};
static_assert(sizeof(AdamWStep) == 7 * sizeof(float));

// The moments of a span, in the type of the format: float, std::uint16_t (the bits of bf16) or std::uint8_t. Int8 also
// has one scale per block; the others have none.
struct MomentSpan {
    MomentFormat format;
    void* exp_avg;
    void* exp_avg_sq;
    float* exp_avg_scale = nullptr;
    float* exp_avg_sq_scale = nullptr;
};

// Either weight, or weight_hi and weight_lo (see bf16.hpp). At most one of grad and grad_bf16: without either the
// gradient is zero. No alignment beyond that of the element; sections must not overlap. exp_avg_sq must not be negative.
struct AdamWSpan {
    float* weight;
    std::uint16_t* weight_hi;
    std::int16_t* weight_lo;
    MomentSpan moments;
    const float* grad;
    const std::uint16_t* grad_bf16;
    std::size_t numel;
};

// The inputs of the rounding of narrow moments (moments.hpp). Fp32 needs none of it.
struct RoundingCounter {
    std::uint64_t record_hash = 0;
    std::uint64_t last_step = 0;  // the number of the last step; earlier ones count back from it
    std::uint64_t first = 0;      // the span's first element in its record; Int8: a multiple of kMomentBlock
};

// Takes all steps in one pass over memory. Every step but the last has a gradient of zero; the last has grad *
// grad_scale. Bit-identical to one call per step: narrow moments are rounded after each of them. Without steps nothing
// changes. Throws std::invalid_argument for Int8 that starts within a block.
void adamw(const AdamWSpan& span, std::span<const AdamWStep> steps, float grad_scale,
           const RoundingCounter& counter);

// The same on a given instruction set, which the machine must support (else std::invalid_argument).
void adamw_with(InstructionSet isa, const AdamWSpan& span, std::span<const AdamWStep> steps, float grad_scale,
                const RoundingCounter& counter);

// dst += src, elementwise. The arrays must not overlap. Subnormals are kept.
void accumulate(float* dst, const float* src, std::size_t n);
void accumulate_bf16(float* dst, const std::uint16_t* src, std::size_t n);
// dst = src, exactly.
void widen_bf16(float* dst, const std::uint16_t* src, std::size_t n);

// Sum of src[i]^2 in double: element i is added to lane i mod 16, in order; then lanes 8 apart are added, then 4, 2, 1.
double sum_of_squares(const float* src, std::size_t n);
double sum_of_squares_with(InstructionSet isa, const float* src, std::size_t n);

// Whether there are no infinities or NaNs.
bool all_finite(const float* src, std::size_t n);

}  // namespace tierstore
