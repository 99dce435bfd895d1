#include "native/optim/adamw.hpp"

#include <charconv>
#include <stdexcept>
#include <string>
#include <vector>

#include "native/base/float_mode.hpp"
#include "native/optim/kernels.hpp"

namespace tierstore {
namespace {

const kernels::Kernels& kernels_of(InstructionSet isa) {
    switch (isa) {
        case InstructionSet::Avx512: return kernels::avx512;
        case InstructionSet::Avx2: return kernels::avx2;
        case InstructionSet::Scalar: break;
    }
    return kernels::scalar;
}

const kernels::Kernels& best() {
    static const kernels::Kernels& chosen = kernels_of(best_instruction_set());
    return chosen;
}

const kernels::Kernels& supported(InstructionSet isa) {
    if (!supports(isa)) throw std::invalid_argument("this machine lacks " + std::string(name(isa)));
    return kernels_of(isa);
}

// 1 - x, where x is the shortest decimal that rounds to the fp32 given.
float one_minus(float x) {
    char text[32];
    const std::to_chars_result written = std::to_chars(text, text + sizeof text, x);
    double decimal = x;
    std::from_chars(text, written.ptr, decimal);
    return static_cast<float>(1.0 - decimal);
}

std::vector<kernels::Scalars> prepare(std::span<const AdamWStep> steps) {
    std::vector<kernels::Scalars> scalars;
    scalars.reserve(steps.size());
    for (const AdamWStep& s : steps) {
        const double lr = s.lr, correction2 = s.bias_correction2_sqrt;
        // Betas hardly ever change, and the decimals cost more than all the rest.
        const bool same1 = !scalars.empty() && scalars.back().beta1 == s.beta1;
        const bool same2 = !scalars.empty() && scalars.back().beta2 == s.beta2;
        scalars.push_back({
            .decay = static_cast<float>(1.0 - lr * s.weight_decay),
            .beta1 = s.beta1,
            .rest1 = same1 ? scalars.back().rest1 : one_minus(s.beta1),
            .beta2 = s.beta2,
            .rest2 = same2 ? scalars.back().rest2 : one_minus(s.beta2),
            .rate = static_cast<float>(lr * correction2 / s.bias_correction1),
            .floor = static_cast<float>(s.eps * correction2),
        });
    }
    return scalars;
}

// The keys of steps last - count + 1 ... last: see moments.hpp.
std::vector<kernels::Step> with_keys(const std::vector<kernels::Scalars>& scalars,
                                     const RoundingCounter& counter) {
    std::vector<kernels::Step> steps;
    steps.reserve(scalars.size());
    for (std::size_t k = 0; k < scalars.size(); ++k) {
        const std::uint64_t number = counter.last_step - (scalars.size() - 1 - k);
        std::uint64_t z = counter.record_hash + number * 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        z ^= z >> 31;
        const kernels::Key key{static_cast<std::uint32_t>(z), static_cast<std::uint32_t>(z >> 32)};
        steps.push_back({scalars[k], key});
    }
    return steps;
}

template <class T>
T* as(void* moment) {
    return static_cast<T*>(moment);
}

void run(const kernels::Kernels& kernels, const AdamWSpan& span, std::span<const AdamWStep> steps,
         float grad_scale, const RoundingCounter& counter) {
    if (steps.empty() || span.numel == 0) return;
    const MomentSpan& moments = span.moments;
    if (moments.format == MomentFormat::Int8 && counter.first % kMomentBlock != 0)
        throw std::invalid_argument("8-bit moments: a span starts within a block");
    // The scalars are double arithmetic, with subnormals whatever the caller had set.
    const FloatMode plain(FloatMode::Subnormals::Keep);
    const std::vector<kernels::Scalars> scalars = prepare(steps);
    const FloatMode flushing(FloatMode::Subnormals::Flush);
    const auto first = static_cast<std::uint32_t>(counter.first);
    switch (moments.format) {
        case MomentFormat::Fp32: {
            auto *m = as<float>(moments.exp_avg), *v = as<float>(moments.exp_avg_sq);
            const kernels::Sections sections{span.weight, span.weight_hi, span.weight_lo, m,
                                             v,           span.grad,      span.grad_bf16, span.numel};
            return kernels.adamw(sections, scalars.data(), scalars.size(), grad_scale);
        }
        case MomentFormat::Bf16: {
            auto *m = as<std::uint16_t>(moments.exp_avg), *v = as<std::uint16_t>(moments.exp_avg_sq);
            const std::vector<kernels::Step> keyed = with_keys(scalars, counter);
            const kernels::Bf16Sections sections{span.weight, span.weight_hi, span.weight_lo, m,    v,
                                                 span.grad,   span.grad_bf16, span.numel,     first};
            return kernels.adamw_bf16(sections, keyed.data(), keyed.size(), grad_scale);
        }
        case MomentFormat::Int8: {
            auto *m = as<std::uint8_t>(moments.exp_avg), *v = as<std::uint8_t>(moments.exp_avg_sq);
            const std::vector<kernels::Step> keyed = with_keys(scalars, counter);
            const kernels::Int8Sections sections{span.weight,
                                                 span.weight_hi,
                                                 span.weight_lo,
                                                 m,
                                                 v,
                                                 moments.exp_avg_scale,
                                                 moments.exp_avg_sq_scale,
                                                 span.grad,
                                                 span.grad_bf16,
                                                 span.numel,
                                                 first};
            return kernels.adamw_int8(sections, keyed.data(), keyed.size(), grad_scale);
        }
    }
}

double sum(const kernels::Kernels& kernels, const float* src, std::size_t n) {
    const FloatMode mode(FloatMode::Subnormals::Keep);
    return kernels.sum_of_squares(src, n);
}

}  // namespace

void adamw(const AdamWSpan& span, std::span<const AdamWStep> steps, float grad_scale,
           const RoundingCounter& counter) {
    run(best(), span, steps, grad_scale, counter);
}

void adamw_with(InstructionSet isa, const AdamWSpan& span, std::span<const AdamWStep> steps, float grad_scale,
                const RoundingCounter& counter) {
    run(supported(isa), span, steps, grad_scale, counter);
}

void accumulate(float* dst, const float* src, std::size_t n) {
    const FloatMode mode(FloatMode::Subnormals::Keep);
    best().accumulate(dst, src, n);
}

void accumulate_bf16(float* dst, const std::uint16_t* src, std::size_t n) {
    const FloatMode mode(FloatMode::Subnormals::Keep);
    best().accumulate_bf16(dst, src, n);
}

void widen_bf16(float* dst, const std::uint16_t* src, std::size_t n) { best().widen_bf16(dst, src, n); }

double sum_of_squares(const float* src, std::size_t n) { return sum(best(), src, n); }

double sum_of_squares_with(InstructionSet isa, const float* src, std::size_t n) {
    return sum(supported(isa), src, n);
}

bool all_finite(const float* src, std::size_t n) { return best().all_finite(src, n); }

}  // namespace tierstore
