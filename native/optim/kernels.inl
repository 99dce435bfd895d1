// The kernels, once for all instruction sets. The including file defines, in an unnamed namespace, `Vec`:
// a register of `Vec::width` floats (`Vec::F`) with its loads, stores and correctly rounded operations,
// and `unroll`, how many registers go side by side so that square roots and divisions overlap.
#include "native/optim/kernels.hpp"

namespace tierstore::kernels {
namespace {

enum class Weight { Whole, Split };
enum class Grad { Zero, Fp32, Bf16 };

struct Constants {
    Vec::F decay, beta1, rest1, beta2, rest2, rate, floor;

    explicit Constants(const Scalars& s)
        : decay(Vec::set(s.decay)),
          beta1(Vec::set(s.beta1)),
          rest1(Vec::set(s.rest1)),
          beta2(Vec::set(s.beta2)),
          rest2(Vec::set(s.rest2)),
          rate(Vec::set(s.rate)),
          floor(Vec::set(s.floor)) {}
};

inline void move_weight(const Constants& c, Vec::F& p, Vec::F m, Vec::F v) {
    p = Vec::sub(Vec::mul(p, c.decay), Vec::div(Vec::mul(c.rate, m), Vec::add(Vec::sqrt(v), c.floor)));
}

inline void step(const Constants& c, Vec::F& p, Vec::F& m, Vec::F& v, Vec::F g) {
    m = Vec::add(Vec::mul(m, c.beta1), Vec::mul(c.rest1, g));
    v = Vec::add(Vec::mul(v, c.beta2), Vec::mul(Vec::mul(c.rest2, g), g));
    move_weight(c, p, m, v);
}

// What step() does with a gradient of +0. Adding zero turns a moment of -0 into +0, as it does there.
inline void step_without_gradient(const Constants& c, Vec::F& p, Vec::F& m, Vec::F& v) {
    m = Vec::add(Vec::mul(m, c.beta1), Vec::set(0.0f));
    v = Vec::mul(v, c.beta2);
    move_weight(c, p, m, v);
}

template <Grad grad, class S>
inline Vec::F load_grad(const S& s, std::size_t at) {
    if constexpr (grad == Grad::Bf16) {
        return Vec::load_bf16(s.grad_bf16 + at);
    } else {
        return Vec::load(s.grad + at);
    }
}

// All steps on `count` registers from element i: read once, written once.
template <Weight weight, Grad grad, int count>
inline void block(const Sections& s, std::size_t i, const Scalars* steps, std::size_t step_count,
                  Vec::F scale) {
    Vec::F p[count], m[count], v[count];
    for (int u = 0; u < count; ++u) {
        const std::size_t at = i + u * Vec::width;
        if constexpr (weight == Weight::Split) {
            p[u] = Vec::load_split(s.weight_hi + at, s.weight_lo + at);
        } else {
            p[u] = Vec::load(s.weight + at);
        }
        m[u] = Vec::load(s.exp_avg + at);
        v[u] = Vec::load(s.exp_avg_sq + at);
    }
    for (std::size_t k = 0; k + 1 < step_count; ++k) {
        const Constants c(steps[k]);
        for (int u = 0; u < count; ++u) step_without_gradient(c, p[u], m[u], v[u]);
    }
    const Constants last(steps[step_count - 1]);
    for (int u = 0; u < count; ++u) {
        const std::size_t at = i + u * Vec::width;
        if constexpr (grad != Grad::Zero) {
            step(last, p[u], m[u], v[u], Vec::mul(load_grad<grad>(s, at), scale));
        } else {
            step_without_gradient(last, p[u], m[u], v[u]);
        }
        if constexpr (weight == Weight::Split) {
            Vec::store_split(s.weight_hi + at, s.weight_lo + at, p[u]);
        } else {
            Vec::store(s.weight + at, p[u]);
        }
        Vec::store(s.exp_avg + at, m[u]);
        Vec::store(s.exp_avg_sq + at, v[u]);
    }
}

template <class T>
inline void copy(T* dst, const T* src, std::size_t n) {
    if (src != nullptr && dst != nullptr) __builtin_memcpy(dst, src, n * sizeof(T));
}

// The last few elements go through the same block, on padded copies.
template <Weight weight, Grad grad>
inline void tail(const Sections& s, std::size_t i, const Scalars* steps, std::size_t step_count,
                 Vec::F scale) {
    constexpr std::size_t width = Vec::width;
    float p[width] = {}, m[width] = {}, v[width] = {}, g[width] = {};
    std::uint16_t hi[width] = {}, narrow[width] = {};
    std::int16_t lo[width] = {};
    const std::size_t n = s.numel - i;
    if constexpr (weight == Weight::Split) {
        copy(hi, s.weight_hi + i, n);
        copy(lo, s.weight_lo + i, n);
    } else {
        copy(p, s.weight + i, n);
    }
    copy(m, s.exp_avg + i, n);
    copy(v, s.exp_avg_sq + i, n);
    if constexpr (grad == Grad::Fp32) copy(g, s.grad + i, n);
    if constexpr (grad == Grad::Bf16) copy(narrow, s.grad_bf16 + i, n);
    block<weight, grad, 1>(Sections{p, hi, lo, m, v, g, narrow, width}, 0, steps, step_count, scale);
    if constexpr (weight == Weight::Split) {
        copy(s.weight_hi + i, hi, n);
        copy(s.weight_lo + i, lo, n);
    } else {
        copy(s.weight + i, p, n);
    }
    copy(s.exp_avg + i, m, n);
    copy(s.exp_avg_sq + i, v, n);
}

struct Fp32 {
    template <Weight weight, Grad grad>
    static void sweep(const Sections& s, const Scalars* steps, std::size_t step_count, float grad_scale) {
        constexpr std::size_t width = Vec::width;
        const Vec::F scale = Vec::set(grad_scale);
        std::size_t i = 0;
        for (; i + unroll * width <= s.numel; i += unroll * width) {
            block<weight, grad, unroll>(s, i, steps, step_count, scale);
        }
        for (; i + width <= s.numel; i += width) block<weight, grad, 1>(s, i, steps, step_count, scale);
        if (i < s.numel) tail<weight, grad>(s, i, steps, step_count, scale);
    }
};

// Calls `sweep` of `Format` for the sections that there are.
template <class Format, Weight weight, class S, class Step>
void adamw_with_weight(const S& s, const Step* steps, std::size_t step_count, float grad_scale) {
    if (s.grad_bf16 != nullptr) {
        Format::template sweep<weight, Grad::Bf16>(s, steps, step_count, grad_scale);
    } else if (s.grad != nullptr) {
        Format::template sweep<weight, Grad::Fp32>(s, steps, step_count, grad_scale);
    } else {
        Format::template sweep<weight, Grad::Zero>(s, steps, step_count, grad_scale);
    }
}

template <class Format, class S, class Step>
void adamw(const S& s, const Step* steps, std::size_t step_count, float grad_scale) {
    s.weight != nullptr ? adamw_with_weight<Format, Weight::Whole>(s, steps, step_count, grad_scale)
                        : adamw_with_weight<Format, Weight::Split>(s, steps, step_count, grad_scale);
}

inline float widen(std::uint16_t bf16) {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(bf16) << 16);
}

// The compiler vectorises what follows, for this unit's instruction set; elementwise or in lanes that the
// source fixes, so the bits are the same.

void accumulate(float* __restrict dst, const float* __restrict src, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) dst[i] += src[i];
}

void accumulate_bf16(float* __restrict dst, const std::uint16_t* __restrict src, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) dst[i] += widen(src[i]);
}

void widen_bf16(float* __restrict dst, const std::uint16_t* __restrict src, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) dst[i] = widen(src[i]);
}

using Floats = float __attribute__((vector_size(16)));
using Doubles = double __attribute__((vector_size(32)));

double sum_of_squares(const float* src, std::size_t n) {
    Doubles lanes[4] = {};
    const auto add = [&](const float* p) {
        for (int j = 0; j < 4; ++j) {
            Floats narrow;
            __builtin_memcpy(&narrow, p + 4 * j, sizeof narrow);
            const Doubles wide = __builtin_convertvector(narrow, Doubles);
            lanes[j] += wide * wide;  // the product of two fp32 values is exact in double
        }
    };
    std::size_t i = 0;
    for (; i + 16 <= n; i += 16) add(src + i);
    if (i < n) {
        float rest[16] = {};
        __builtin_memcpy(rest, src + i, (n - i) * sizeof(float));
        add(rest);
    }
    const Doubles s = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
    return (s[0] + s[2]) + (s[1] + s[3]);
}

bool all_finite(const float* src, std::size_t n) {
    constexpr std::uint32_t exponent = 0x7f800000u;
    constexpr std::size_t run = 4096;  // a vectorised loop cannot leave early; this is how late it may leave
    for (std::size_t i = 0; i < n; i += run) {
        const std::size_t end = i + run < n ? i + run : n;
        std::uint32_t bad = 0;
        for (std::size_t j = i; j < end; ++j) {
            bad |= (__builtin_bit_cast(std::uint32_t, src[j]) & exponent) == exponent ? 1u : 0u;
        }
        if (bad != 0) return false;
    }
    return true;
}

}  // namespace
}  // namespace tierstore::kernels

#include "native/optim/narrow.inl"

namespace tierstore::kernels {
namespace {

constexpr Kernels all = {adamw<Fp32, Sections, Scalars>,
                         adamw<Bf16, Bf16Sections, Step>,
                         adamw<Int8, Int8Sections, Step>,
                         accumulate,
                         accumulate_bf16,
                         widen_bf16,
                         sum_of_squares,
                         all_finite};

}  // namespace
}  // namespace tierstore::kernels
