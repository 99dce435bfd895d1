// AdamW and the sums around it (scalar stand-in).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tierstore {

struct AdamWStep {
    float lr, beta1, beta2, eps, weight_decay, bias_correction1, bias_correction2_sqrt;
};

struct AdamWSpan {
    float* weight;
    uint16_t* weight_hi;
    int16_t* weight_lo;
    float* exp_avg;
    float* exp_avg_sq;
    const float* grad;
    size_t numel;
};

void adamw(const AdamWSpan& span, std::span<const AdamWStep> steps, float grad_scale);
void accumulate(float* dst, const float* src, size_t n);
void accumulate_bf16(float* dst, const uint16_t* src, size_t n);
void widen_bf16(float* dst, const uint16_t* src, size_t n);
double sum_of_squares(const float* src, size_t n);
bool all_finite(const float* src, size_t n);

}  // namespace tierstore
