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
    for (int u = 0; u < count; ++u) {
        const std::size_t at = i + u * Vec::width;
        p[u] = load_weight<weight>(s, at);
        m[u] = Vec::load_bf16(s.exp_avg + at);
        v[u] = Vec::load_bf16(s.exp_avg_sq + at);
        element[u] = Vec::plus(Vec::lanes(), Vec::integer(s.first + static_cast<std::uint32_t>(at)));
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
        if constexpr (grad == Grad::Given) {
            step(last, p[u], m[u], v[u], Vec::mul(Vec::load(s.grad + at), scale));
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
    std::uint16_t hi[width] = {}, m[width] = {}, v[width] = {};
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
    if constexpr (grad == Grad::Given) copy(g, s.grad + i, n);
    const std::uint32_t first = s.first + static_cast<std::uint32_t>(i);
    block_bf16<weight, grad, 1>({p, hi, lo, m, v, g, width, first}, 0, steps, step_count, scale);
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

// Codes without their sign, as integers, to values below 2: a subnormal's mantissa is linear, and the smaller term.
template <std::uint32_t lowest>
inline Vec::F dequantise(Vec::I code) {
    const Vec::I fraction = Vec::shift_left<code_shift>(code);
    const Vec::F linear = Vec::sub(Vec::as_floats(Vec::plus(fraction, Vec::integer(lowest))),
                                   Vec::as_floats(Vec::integer(lowest)));
    const Vec::I floating = Vec::plus(fraction, Vec::integer(lowest - exponent_one));
    return Vec::as_floats(Vec::lesser(bits_of(linear), floating));
}

// Magnitudes divided by the scale, to codes.
template <std::uint32_t lowest>
inline Vec::I quantise(Vec::F x, Vec::I random) {
    const Vec::I linear =
        Vec::minus(bits_of(Vec::add(x, Vec::as_floats(Vec::integer(lowest)))), Vec::integer(lowest));
    const Vec::I floating = Vec::minus(bits_of(x), Vec::integer(lowest - exponent_one));
    return Vec::shift_right<code_shift>(Vec::plus(Vec::greater(linear, floating), random));
}

struct Scale {
    float scale, inverse;
    enum class Block { Zero, Finite, Saturated, Poisoned } block;
};

// `top`: the largest of the block's magnitudes, as bits.
inline Scale scale_of(std::uint32_t top) {
    if (top == 0) return {0.0f, 0.0f, Scale::Block::Zero};
    if (top >= infinity_bits) return {__builtin_nanf(""), 0.0f, Scale::Block::Poisoned};
    std::uint32_t exponent = (top + top_code_rest) >> 23;
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

// One moment of a block between its step and its rounding.
struct alignas(64) Values {
    float at[block_numel];
};

// What is too large for the largest scale becomes the largest code.
inline void saturate(Values& values) {
    constexpr float most = 1.9375f * 0x1p126f;
    for (float& x : values.at) x = x > most ? most : x < -most ? -most : x;
}

inline void store_scale(float& scale, std::uint8_t* codes, const Scale& made) {
    scale = made.scale;
    if (made.block == Scale::Block::Poisoned) __builtin_memset(codes, 0, block_numel);
}

// One step on the whole block from element i.
template <Weight weight, Grad grad>
inline void block_int8(const Int8Sections& s, std::size_t i, const Step& now, Vec::F grad_scale) {
    constexpr std::size_t width = Vec::width;
    Values m, v;
    const std::size_t b = i / block_numel;
    const Constants c(now.scalars);
    {
        const Vec::F m_scale = Vec::set(s.exp_avg_scale[b]), v_scale = Vec::set(s.exp_avg_sq_scale[b]);
        Vec::I m_top = Vec::integer(0), v_top = Vec::integer(0);
        for (std::size_t j = 0; j < block_numel; j += unroll * width) {
            for (int u = 0; u < unroll; ++u) {
                const std::size_t within = j + u * width, at = i + within;
                const Vec::I code = Vec::load_bytes(s.exp_avg + at);
                const Vec::I sign = Vec::shift_left<31>(Vec::shift_right<7>(code));
                const Vec::I unsigned_code = Vec::bit_and(code, Vec::integer(0x7fu));
                const Vec::F m_size = Vec::mul(dequantise<exp_avg_lowest>(unsigned_code), m_scale);
                Vec::F m_new = Vec::as_floats(Vec::bit_xor(bits_of(m_size), sign));
                const Vec::I sq_code = Vec::load_bytes(s.exp_avg_sq + at);
                Vec::F v_new = Vec::mul(dequantise<exp_avg_sq_lowest>(sq_code), v_scale);
                Vec::F p = load_weight<weight>(s, at);
                if constexpr (grad == Grad::Given) {
                    step(c, p, m_new, v_new, Vec::mul(Vec::load(s.grad + at), grad_scale));
                } else {
                    step_without_gradient(c, p, m_new, v_new);
                }
                store_weight<weight>(s, at, p);
                Vec::store(m.at + within, m_new);
                Vec::store(v.at + within, v_new);
                m_top = Vec::greater(m_top, magnitude(m_new));
                v_top = Vec::greater(v_top, magnitude(v_new));
            }
        }
        const Scale m_made = scale_of(largest(m_top)), v_made = scale_of(largest(v_top));
        if (m_made.block == Scale::Block::Saturated) saturate(m);
        if (v_made.block == Scale::Block::Saturated) saturate(v);
        const Vec::F m_inverse = Vec::set(m_made.inverse), v_inverse = Vec::set(v_made.inverse);
        constexpr std::size_t group = Vec::bytes_group;
        const Vec::I start = Vec::plus(Vec::lanes(), Vec::integer(s.first + static_cast<std::uint32_t>(i)));
        for (std::size_t j = 0; j < block_numel; j += group * width) {
            Vec::I m_codes[group], v_codes[group];
            for (std::size_t u = 0; u < group; ++u) {
                const std::size_t within = j + u * width;
                const Vec::I h =
                    hash(Vec::plus(start, Vec::integer(static_cast<std::uint32_t>(within))), now.key);
                const Vec::F m_new = Vec::load(m.at + within), v_new = Vec::load(v.at + within);
                const Vec::F m_size = Vec::mul(Vec::as_floats(magnitude(m_new)), m_inverse);
                const Vec::I v_bits = magnitude(v_new);
                const Vec::F v_size = Vec::mul(Vec::as_floats(v_bits), v_inverse);
                const Vec::I sign = Vec::shift_left<7>(Vec::shift_right<31>(bits_of(m_new)));
                const Vec::I m_code = quantise<exp_avg_lowest>(m_size, Vec::shift_right<13>(h));
                m_codes[u] = Vec::bit_or(m_code, sign);
                const Vec::I v_code =
                    quantise<exp_avg_sq_lowest>(v_size, Vec::bit_and(h, Vec::integer(top_code_rest)));
                v_codes[u] = Vec::greater(v_code, Vec::lesser(v_bits, Vec::integer(1)));
            }
            Vec::store_bytes(s.exp_avg + i + j, m_codes);
            Vec::store_bytes(s.exp_avg_sq + i + j, v_codes);
        }
        store_scale(s.exp_avg_scale[b], s.exp_avg + i, m_made);
        store_scale(s.exp_avg_sq_scale[b], s.exp_avg_sq + i, v_made);
    }
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
    std::uint16_t hi[block_numel] = {};
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
    if constexpr (grad == Grad::Given) copy(g, s.grad + i, n);
    const std::uint32_t first = s.first + static_cast<std::uint32_t>(i);
    const Int8Sections padded{p, hi,          lo,   m, v, s.exp_avg_scale + b, s.exp_avg_sq_scale + b,
                              g, block_numel, first};
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

template <class Format, class S>
void adamw_narrow(const S& s, const Step* steps, std::size_t step_count, float grad_scale) {
    if (s.weight != nullptr) {
        s.grad != nullptr
            ? Format::template sweep<Weight::Whole, Grad::Given>(s, steps, step_count, grad_scale)
            : Format::template sweep<Weight::Whole, Grad::Zero>(s, steps, step_count, grad_scale);
    } else {
        s.grad != nullptr
            ? Format::template sweep<Weight::Split, Grad::Given>(s, steps, step_count, grad_scale)
            : Format::template sweep<Weight::Split, Grad::Zero>(s, steps, step_count, grad_scale);
    }
}

}  // namespace
}  // namespace tierstore::kernels
