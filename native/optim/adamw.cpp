#include "native/optim/adamw.hpp"

#include <bit>
#include <cmath>

namespace tierstore {
namespace {

float widen(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

}  // namespace

void adamw(const AdamWSpan& s, std::span<const AdamWStep> steps, float grad_scale) {
    for (size_t i = 0; i < s.numel; ++i) {
        float w = s.weight
                      ? s.weight[i]
                      : std::bit_cast<float>((static_cast<uint32_t>(s.weight_hi[i]) << 16) +
                                             static_cast<uint32_t>(static_cast<int32_t>(s.weight_lo[i])));
        float m = s.exp_avg[i];
        float v = s.exp_avg_sq[i];
        for (size_t k = 0; k < steps.size(); ++k) {
            const AdamWStep& step = steps[k];
            float g = (k + 1 == steps.size() && s.grad) ? s.grad[i] * grad_scale : 0.0f;
            w = w * (1.0f - step.lr * step.weight_decay);
            m = m + (1.0f - step.beta1) * (g - m);
            v = step.beta2 * v + (1.0f - step.beta2) * g * g;
            w = w - (step.lr / step.bias_correction1) * m /
                        (std::sqrt(v) / step.bias_correction2_sqrt + step.eps);
        }
        s.exp_avg[i] = m;
        s.exp_avg_sq[i] = v;
        if (s.weight) {
            s.weight[i] = w;
        } else {
            uint32_t bits = std::bit_cast<uint32_t>(w);
            uint32_t hi = (bits + 0x8000u) >> 16;
            s.weight_hi[i] = static_cast<uint16_t>(hi);
            s.weight_lo[i] = static_cast<int16_t>(bits - (hi << 16));
        }
    }
}

void accumulate(float* dst, const float* src, size_t n) {
    for (size_t i = 0; i < n; ++i) dst[i] += src[i];
}

void accumulate_bf16(float* dst, const uint16_t* src, size_t n) {
    for (size_t i = 0; i < n; ++i) dst[i] += widen(src[i]);
}

void widen_bf16(float* dst, const uint16_t* src, size_t n) {
    for (size_t i = 0; i < n; ++i) dst[i] = widen(src[i]);
}

double sum_of_squares(const float* src, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; ++i) sum += static_cast<double>(src[i]) * static_cast<double>(src[i]);
    return sum;
}

bool all_finite(const float* src, size_t n) {
    for (size_t i = 0; i < n; ++i)
        if (!std::isfinite(src[i])) return false;
    return true;
}

}  // namespace tierstore
