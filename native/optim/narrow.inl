// AdamW with moments in bf16 and in 8 bits, once for all instruction sets; included by kernels.inl. moments.hpp
// defines the formats and their rounding. Beside what kernels.inl asks for, `Vec` has registers of as many unsigned
// 32-bit integers (`Vec::I`) with their operations.
namespace tierstore::kernels {
namespace {

inline Vec::I bits_of(Vec::F x) { return Vec::as_integers(x); }

// One hash for both moments of each element: see moments.hpp.
inline Vec::I hash(Vec::I element, Key key) {
    Vec::I h = Vec::bit_xor(element, Vec::integer(key.low));
    h = Vec::bit_xor(h, Vec::shift_right<16>(h));
    h = Vec::multiply(h, Vec::integer(0x7feb352du));
    h = Vec::plus(h, Vec::integer(key.high));
    h = Vec::bit_xor(h, Vec::shift_right<15>(h));
    h = Vec::multiply(h, Vec::integer(0x846ca68bu));
    return Vec::bit_xor(h, Vec::shift_right<16>(h));
}

inline Vec::I magnitude(Vec::F x) { return Vec::bit_and(bits_of(x), Vec::integer(0x7fffffffu)); }

template <Weight weight, class S>
inline Vec::F load_weight(const S& s, std::size_t at) {
    if constexpr (weight == Weight::Split) {
        return Vec::load_split(s.weight_hi + at, s.weight_lo + at);
    } else {
        return Vec::load(s.weight + at);
    }
}

template <Weight weight, class S>
inline void store_weight(const S& s, std::size_t at, Vec::F p) {
    if constexpr (weight == Weight::Split) {
        Vec::store_split(s.weight_hi + at, s.weight_lo + at, p);
    } else {
        Vec::store(s.weight + at, p);
    }
}

// ---- bf16

// The bits of a bf16 in the upper half; what stands in the lower half is to be dropped.
inline Vec::I round_bf16(Vec::F x, Vec::I random) {
    const Vec::I below = Vec::zero_unless_below(random, magnitude(x), Vec::integer(largest_bf16_bits));
    return Vec::plus(bits_of(x), below);
}

struct Rounded {
    Vec::I exp_avg, exp_avg_sq;
};

inline Rounded round_bf16(Vec::F m, Vec::F v, Vec::I element, Key key) {
    const Vec::I h = hash(element, key);
    return {round_bf16(m, Vec::bit_and(h, Vec::integer(0xffffu))), round_bf16(v, Vec::shift_right<16>(h))};
}

inline Vec::F upper_half(Vec::I rounded) {
    return Vec::as_floats(Vec::bit_and(rounded, Vec::integer(0xffff0000u)));
}

// All steps on `count` registers from element i, rounded after each: read once, written once.
template <Weight weight, Grad grad, int count>
inline void block_bf16(const Bf16Sections& s, std::size_t i, const Step* steps, std::size_t step_count,
                       Vec::F scale) {
    Vec::F p[count], m[count], v[count];
    Vec::I element[count];
    const Vec::I first = Vec::plus(Vec::lanes(), Vec::integer(s.first + static_cast<std::uint32_t>(i)));
    for (int u = 0; u < count; ++u) {
        const std::size_t at = i + u * Vec::width;
        p[u] = load_weight<weight>(s, at);
        m[u] = Vec::load_bf16(s.exp_avg + at);
        v[u] = Vec::load_bf16(s.exp_avg_sq + at);
        element[u] = Vec::plus(first, Vec::integer(static_cast<std::uint32_t>(u * Vec::width)));
    }
    for (std::size_t k = 0; k + 1 < step_count; ++k) {
        const Constants c(steps[k].scalars);
        for (int u = 0; u < count; ++u) {
            step_without_gradient(c, p[u], m[u], v[u]);
            const Rounded rounded = round_bf16(m[u], v[u], element[u], steps[k].key);
            m[u] = upper_half(rounded.exp_avg);
            v[u] = upper_half(rounded.exp_avg_sq);
        }
    }
    const Step& end = steps[step_count - 1];
    const Constants last(end.scalars);
    for (int u = 0; u < count; ++u) {
        const std::size_t at = i + u * Vec::width;
        if constexpr (grad != Grad::Zero) {
            step(last, p[u], m[u], v[u], Vec::mul(load_grad<grad>(s, at), scale));
        } else {
            step_without_gradient(last, p[u], m[u], v[u]);
        }
        const Rounded rounded = round_bf16(m[u], v[u], element[u], end.key);
        store_weight<weight>(s, at, p[u]);
        Vec::store_upper_halves(s.exp_avg + at, s.exp_avg_sq + at, rounded.exp_avg, rounded.exp_avg_sq);
    }
}

template <Weight weight, Grad grad>
inline void tail_bf16(const Bf16Sections& s, std::size_t i, const Step* steps, std::size_t step_count,
                      Vec::F scale) {
    constexpr std::size_t width = Vec::width;
    float p[width] = {}, g[width] = {};
    std::uint16_t hi[width] = {}, m[width] = {}, v[width] = {}, narrow[width] = {};
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
    const std::uint32_t first = s.first + static_cast<std::uint32_t>(i);
    block_bf16<weight, grad, 1>({p, hi, lo, m, v, g, narrow, width, first}, 0, steps, step_count, scale);
    if constexpr (weight == Weight::Split) {
        copy(s.weight_hi + i, hi, n);
        copy(s.weight_lo + i, lo, n);
    } else {
        copy(s.weight + i, p, n);
    }
    copy(s.exp_avg + i, m, n);
    copy(s.exp_avg_sq + i, v, n);
}

struct Bf16 {
    template <Weight weight, Grad grad>
    static void sweep(const Bf16Sections& s, const Step* steps, std::size_t step_count, float grad_scale) {
        constexpr std::size_t width = Vec::width;
        const Vec::F scale = Vec::set(grad_scale);
        std::size_t i = 0;
        for (; i + unroll * width <= s.numel; i += unroll * width) {
            block_bf16<weight, grad, unroll>(s, i, steps, step_count, scale);
        }
        for (; i + width <= s.numel; i += width) {
            block_bf16<weight, grad, 1>(s, i, steps, step_count, scale);
        }
        if (i < s.numel) tail_bf16<weight, grad>(s, i, steps, step_count, scale);
    }
};

// ---- 8 bits

// Magnitudes to codes, modulo 256: see kernels.hpp.
inline Vec::I quantise(Vec::F x, Vec::I random) {
    const Vec::I linear = bits_of(Vec::add(x, Vec::as_floats(Vec::integer(lowest_bits))));
    const Vec::I floating = Vec::plus(bits_of(x), Vec::integer(exponent_one));
    return Vec::shift_right<code_shift>(Vec::plus(Vec::greater(linear, floating), random));
}

struct Scale {
    float scale, inverse;
    enum class Block { Zero, Finite, Saturated, Poisoned } block;
};

// `top`: the largest of the block's magnitudes, as bits; its sign is not known.
inline Scale scale_of(std::uint32_t top) {
    top &= 0x7fffffffu;
    if (top == 0) return {0.0f, 0.0f, Scale::Block::Zero};
    if (top >= infinity_bits) return {__builtin_nanf(""), 0.0f, Scale::Block::Poisoned};
    std::uint32_t exponent = (top + random_mask) >> 23;
    const auto block = exponent > most_scale ? Scale::Block::Saturated : Scale::Block::Finite;
    if (exponent < least_scale) exponent = least_scale;
    if (exponent > most_scale) exponent = most_scale;
    return {__builtin_bit_cast(float, exponent << 23), __builtin_bit_cast(float, (254u - exponent) << 23),
            block};
}

inline std::uint32_t largest(Vec::I x) {
    std::uint32_t lanes[Vec::width], top = 0;
    Vec::store_integers(lanes, x);
    for (std::size_t j = 0; j < Vec::width; ++j) top = lanes[j] > top ? lanes[j] : top;
    return top;
}

// One moment of a block.
struct alignas(64) Values {
    float at[block_numel];
};

// What is too large for the largest scale becomes the largest code.
inline void saturate(Values& values) {
    for (float& x : values.at) x = x > most_value ? most_value : x < -most_value ? -most_value : x;
}

inline void store_scale(float& scale, std::uint8_t* codes, const Scale& made) {
    scale = made.scale;
    if (made.block == Scale::Block::Poisoned) __builtin_memset(codes, 0, block_numel);
}

// Fetches what a later pass will read: rounding leaves the memory idle. Beyond the end it does no harm.
template <Weight weight, Grad grad>
inline void prefetch_block(const Int8Sections& s, std::size_t at, std::size_t numel) {
    constexpr std::size_t line = 64;
    for (std::size_t j = 0; j < numel; j += line / 4) {
        if constexpr (weight == Weight::Whole) __builtin_prefetch(s.weight + at + j, 1);
        if constexpr (grad == Grad::Fp32) __builtin_prefetch(s.grad + at + j);
    }
    for (std::size_t j = 0; j < numel; j += line / 2) {
        if constexpr (weight == Weight::Split) {
            __builtin_prefetch(s.weight_hi + at + j, 1);
            __builtin_prefetch(s.weight_lo + at + j, 1);
        }
        if constexpr (grad == Grad::Bf16) __builtin_prefetch(s.grad_bf16 + at + j);
    }
    __builtin_prefetch(s.exp_avg + at, 1);
    __builtin_prefetch(s.exp_avg_sq + at, 1);
}

// The moments of a block between their step and their rounding, and the largest of their magnitudes.
struct Fresh {
    Values exp_avg, exp_avg_sq;
    std::uint32_t exp_avg_top, exp_avg_sq_top;
};

template <Weight weight, Grad grad>
inline void step_block(const Int8Sections& s, std::size_t i, const Scalars& scalars, Vec::F grad_scale,
                       Fresh& fresh) {
    const std::size_t b = i / block_numel;
    // A scale is a power of two: whether it multiplies the code or beta first, the bits are the same (a beta below
    // 2^-17 may underflow where the moment does not).
    Constants c(scalars);
    c.beta1 = Vec::mul(c.beta1, Vec::set(s.exp_avg_scale[b] * exp_avg_from_half));
    c.beta2 = Vec::mul(c.beta2, Vec::set(s.exp_avg_sq_scale[b] * exp_avg_sq_from_half));
    Vec::I m_top = Vec::integer(0), v_top = Vec::integer(0);
    for (std::size_t j = 0; j < block_numel; j += unroll * Vec::width) {
        for (int u = 0; u < unroll; ++u) {
            const std::size_t within = j + u * Vec::width, at = i + within;
            Vec::F m = Vec::load_signed_codes(s.exp_avg + at), v = Vec::load_codes(s.exp_avg_sq + at);
            Vec::F p = load_weight<weight>(s, at);
            if constexpr (grad != Grad::Zero) {
                step(c, p, m, v, Vec::mul(load_grad<grad>(s, at), grad_scale));
            } else {
                step_without_gradient(c, p, m, v);
            }
            store_weight<weight>(s, at, p);
            Vec::store(fresh.exp_avg.at + within, m);
            Vec::store(fresh.exp_avg_sq.at + within, v);
            m_top = Vec::greater(m_top, magnitude(m));
            v_top = Vec::greater_unsigned(v_top, bits_of(v));  // not negative, but for a NaN's sign
        }
    }
    fresh.exp_avg_top = largest(m_top);
    fresh.exp_avg_sq_top = largest(v_top);
}

template <Weight weight, Grad grad>
inline void round_block(const Int8Sections& s, std::size_t i, Key key, Fresh& fresh) {
    constexpr std::size_t width = Vec::width, group = Vec::codes_group;
    const std::size_t b = i / block_numel;
    const Scale m_scale = scale_of(fresh.exp_avg_top), v_scale = scale_of(fresh.exp_avg_sq_top);
    if (m_scale.block == Scale::Block::Saturated) saturate(fresh.exp_avg);
    if (v_scale.block == Scale::Block::Saturated) saturate(fresh.exp_avg_sq);
    const Vec::F to_m = Vec::set(m_scale.inverse * exp_avg_to_lowest);
    const Vec::F to_v = Vec::set(v_scale.inverse * exp_avg_sq_to_lowest);
    Vec::I element = Vec::plus(Vec::lanes(), Vec::integer(s.first + static_cast<std::uint32_t>(i)));
    for (std::size_t j = 0; j < block_numel; j += group * width) {
        prefetch_block<weight, grad>(s, i + block_numel + j, group * width);
        Vec::I m_codes[group], v_codes[group], m_bits[group], v_bits[group];
        for (std::size_t u = 0; u < group; ++u) {
            const std::size_t within = j + u * width;
            const Vec::I h = hash(element, key);
            element = Vec::plus(element, Vec::integer(width));
            const Vec::F m = Vec::load(fresh.exp_avg.at + within),
                         v = Vec::load(fresh.exp_avg_sq.at + within);
            m_bits[u] = bits_of(m);
            v_bits[u] = bits_of(v);
            m_codes[u] =
                quantise(Vec::mul(Vec::as_floats(magnitude(m)), to_m), Vec::shift_right<32 - code_shift>(h));
            v_codes[u] = quantise(Vec::mul(v, to_v), Vec::bit_and(h, Vec::integer(random_mask)));
        }
        Vec::store_signed_codes(s.exp_avg + i + j, m_codes, m_bits);
        Vec::store_codes_not_zero(s.exp_avg_sq + i + j, v_codes, v_bits);
    }
    store_scale(s.exp_avg_scale[b], s.exp_avg + i, m_scale);
    store_scale(s.exp_avg_sq_scale[b], s.exp_avg_sq + i, v_scale);
}

// One step on the whole block from element i.
template <Weight weight, Grad grad>
inline void block_int8(const Int8Sections& s, std::size_t i, const Step& now, Vec::F grad_scale) {
    Fresh fresh;
    step_block<weight, grad>(s, i, now.scalars, grad_scale, fresh);
    round_block<weight, grad>(s, i, now.key, fresh);
}

// All steps on a block while it lies in the first-level cache.
template <Weight weight, Grad grad>
inline void steps_int8(const Int8Sections& s, std::size_t i, const Step* steps, std::size_t step_count,
                       Vec::F scale) {
    for (std::size_t k = 0; k + 1 < step_count; ++k) block_int8<weight, Grad::Zero>(s, i, steps[k], scale);
    block_int8<weight, grad>(s, i, steps[step_count - 1], scale);
}

// A shorter last block goes the same way, on padded copies: zeros change neither its scale nor its codes.
template <Weight weight, Grad grad>
void tail_int8(const Int8Sections& s, std::size_t i, const Step* steps, std::size_t step_count,
               Vec::F scale) {
    float p[block_numel] = {}, g[block_numel] = {};
    std::uint16_t hi[block_numel] = {}, narrow[block_numel] = {};
    std::int16_t lo[block_numel] = {};
    std::uint8_t m[block_numel] = {}, v[block_numel] = {};
    const std::size_t n = s.numel - i, b = i / block_numel;
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
    const std::uint32_t first = s.first + static_cast<std::uint32_t>(i);
    const Int8Sections padded{p, hi,     lo,          m,    v, s.exp_avg_scale + b, s.exp_avg_sq_scale + b,
                              g, narrow, block_numel, first};
    steps_int8<weight, grad>(padded, 0, steps, step_count, scale);
    if constexpr (weight == Weight::Split) {
        copy(s.weight_hi + i, hi, n);
        copy(s.weight_lo + i, lo, n);
    } else {
        copy(s.weight + i, p, n);
    }
    copy(s.exp_avg + i, m, n);
    copy(s.exp_avg_sq + i, v, n);
}

struct Int8 {
    template <Weight weight, Grad grad>
    static void sweep(const Int8Sections& s, const Step* steps, std::size_t step_count, float grad_scale) {
        const Vec::F scale = Vec::set(grad_scale);
        std::size_t i = 0;
        for (; i + block_numel <= s.numel; i += block_numel) {
            steps_int8<weight, grad>(s, i, steps, step_count, scale);
        }
        if (i < s.numel) tail_int8<weight, grad>(s, i, steps, step_count, scale);
    }
};

}  // namespace
}  // namespace tierstore::kernels
