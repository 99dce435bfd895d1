#include "native/optim/adamw.hpp"

#include <xmmintrin.h>

#include <charconv>
#include <stdexcept>
#include <string>
#include <vector>

#include "native/optim/kernels.hpp"

namespace tierstore {
namespace {

// The thread's SSE control word for a scope: exceptions masked, round to nearest, whatever the caller had.
class FloatMode {
public:
    enum class Subnormals { Keep, Flush };

    explicit FloatMode(Subnormals subnormals) : saved_(_mm_getcsr()) {
        constexpr unsigned defaults = 0x1f80, flush_to_zero = 0x8000, denormals_are_zero = 0x0040;
        constexpr unsigned flush = defaults | flush_to_zero | denormals_are_zero;
        _mm_setcsr(subnormals == Subnormals::Flush ? flush : defaults);
    }
    ~FloatMode() { _mm_setcsr(saved_); }
    FloatMode(const FloatMode&) = delete;
    FloatMode& operator=(const FloatMode&) = delete;

private:
    unsigned saved_;
};

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

void run(const kernels::Kernels& kernels, const AdamWSpan& span, std::span<const AdamWStep> steps,
         float grad_scale) {
    if (steps.empty() || span.numel == 0) return;
    // The scalars are double arithmetic, with subnormals whatever the caller had set.
    const FloatMode plain(FloatMode::Subnormals::Keep);
    const std::vector<kernels::Scalars> scalars = prepare(steps);
    const FloatMode flushing(FloatMode::Subnormals::Flush);
    const kernels::Sections sections{span.weight,     span.weight_hi, span.weight_lo, span.exp_avg,
                                     span.exp_avg_sq, span.grad,      span.numel};
    kernels.adamw(sections, scalars.data(), scalars.size(), grad_scale);
}

double sum(const kernels::Kernels& kernels, const float* src, std::size_t n) {
    const FloatMode mode(FloatMode::Subnormals::Keep);
    return kernels.sum_of_squares(src, n);
}

}  // namespace

void adamw(const AdamWSpan& span, std::span<const AdamWStep> steps, float grad_scale) {
    run(best(), span, steps, grad_scale);
}

void adamw_with(InstructionSet isa, const AdamWSpan& span, std::span<const AdamWStep> steps,
                float grad_scale) {
    run(supported(isa), span, steps, grad_scale);
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
