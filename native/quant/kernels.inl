// The products, once for all instruction sets. The including file defines, in an unnamed namespace, `V`: 16 lanes of
// fp32 with correctly rounded operations, decoding of codes, and `sum`, which adds lanes l and l + 8, then l and
// l + 4, l + 2, l + 1; and `tile_rows` x `tile_outputs`, how many sums go side by side.
//
// Each output is sum(lanes), lane by lane in ascending order of columns, of fl(x * w) with w the dequantised weight
// in fp32: its bits depend on its row of x and its row of the matrix alone, not on the tile that it is computed in.
#include "native/quant/kernels.hpp"

namespace tierstore::quant_kernels {
namespace {

// w = code * scale, codes from -127 to 127; a scale a block.
struct Int8 {
    static constexpr std::size_t block_bytes = block, scale_floats = 1;
    struct Scale {
        V scale;
        explicit Scale(const float* p) : scale(V::set(*p)) {}
    };
    // Weights 16 * index ... of a block. Index is a constant wherever this is inlined.
    static V weights(const std::uint8_t* codes, const Scale& s, std::size_t index) {
        return V::mul(V::load_int8(codes + lanes * index), s.scale);
    }
};

// w = code * scale + least, codes from 0 to 15; (scale, least) a block. Byte i of 16 holds value i of 32 in its low
// half, and value 16 + i in its high half.
struct Int4 {
    static constexpr std::size_t block_bytes = block / 2, scale_floats = 2;
    using Scale = V::Table;
    static V weights(const std::uint8_t* codes, const Scale& s, std::size_t index) {
        const std::uint8_t* bytes = codes + 16 * (index / 2);
        return index % 2 == 0 ? s.low(bytes) : s.high(bytes);
    }
};

inline void store(const Product& p, std::size_t m, std::size_t n, float value) {
    if (p.y != nullptr) {
        p.y[m * p.y_stride + n] = value;
        return;
    }
    const auto bits = __builtin_bit_cast(std::uint32_t, value);
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const std::uint32_t rounded = nan ? bits | 0x00400000u : bits + 0x7fffu + (bits >> 16 & 1u);
    p.y_bf16[m * p.y_stride + n] = static_cast<std::uint16_t>(rounded >> 16);
}

// One row of x: the weights go through registers only, `count` rows of the matrix side by side.
template <class Format, std::size_t count>
inline void single(const Product& p, std::size_t n) {
    const std::size_t blocks = p.columns / block, row_bytes = blocks * Format::block_bytes;
    const std::uint8_t* codes = p.codes + n * row_bytes;
    const float* scales = p.scales + n * blocks * Format::scale_floats;
    const std::size_t row_scales = blocks * Format::scale_floats;
    V sums[count];
    for (std::size_t r = 0; r < count; ++r) sums[r] = V::set(0.0f);
    for (std::size_t b = 0; b < blocks; ++b) {
        V x[block / lanes];
        for (std::size_t i = 0; i < block / lanes; ++i) x[i] = V::load(p.x + b * block + i * lanes);
        for (std::size_t r = 0; r < count; ++r) {
            const std::uint8_t* from = codes + r * row_bytes + b * Format::block_bytes;
            // The rows that come after these.
            __builtin_prefetch(from + count * row_bytes);
            const typename Format::Scale scale(scales + r * row_scales + b * Format::scale_floats);
            for (std::size_t i = 0; i < block / lanes; ++i) {
                sums[r] = V::add(sums[r], V::mul(Format::weights(from, scale, i), x[i]));
            }
        }
    }
    for (std::size_t r = 0; r < count; ++r) store(p, 0, n + r, V::sum(sums[r]));
}

// Adds the products of `width` columns to the sums of rows x outputs; `w` holds a panel of each output.
template <std::size_t rows, std::size_t outputs>
inline void tile(const float* x, std::size_t x_stride, const float* w, std::size_t width, float* sums) {
    V s[rows][outputs];
    for (std::size_t m = 0; m < rows; ++m) {
        for (std::size_t n = 0; n < outputs; ++n) s[m][n] = V::load(sums + (m * outputs + n) * lanes);
    }
    for (std::size_t k = 0; k < width; k += lanes) {
        V weights[outputs];
        for (std::size_t n = 0; n < outputs; ++n) weights[n] = V::load(w + n * panel + k);
        for (std::size_t m = 0; m < rows; ++m) {
            const V values = V::load(x + m * x_stride + k);
            for (std::size_t n = 0; n < outputs; ++n) {
                s[m][n] = V::add(s[m][n], V::mul(weights[n], values));
            }
        }
    }
    for (std::size_t m = 0; m < rows; ++m) {
        for (std::size_t n = 0; n < outputs; ++n) V::store(sums + (m * outputs + n) * lanes, s[m][n]);
    }
}

// Several rows of x: a panel of weights is dequantised once for all of them; sums wait in memory meanwhile.
template <class Format, std::size_t outputs>
inline void several(const Product& p, std::size_t first, std::size_t rows, std::size_t n) {
    alignas(64) float w[outputs * panel];
    alignas(64) float sums[most_rows * outputs * lanes];
    for (std::size_t i = 0; i < rows * outputs * lanes; ++i) sums[i] = 0.0f;
    const std::size_t blocks = p.columns / block;
    for (std::size_t begin = 0; begin < p.columns; begin += panel) {
        const std::size_t width = p.columns - begin < panel ? p.columns - begin : panel;
        for (std::size_t r = 0; r < outputs; ++r) {
            for (std::size_t b = 0; b < width / block; ++b) {
                const std::size_t at = (n + r) * blocks + begin / block + b;
                const std::uint8_t* from = p.codes + at * Format::block_bytes;
                const typename Format::Scale scale(p.scales + at * Format::scale_floats);
                for (std::size_t i = 0; i < block / lanes; ++i) {
                    V::store(w + r * panel + b * block + i * lanes, Format::weights(from, scale, i));
                }
            }
        }
        const float* x = p.x + first * p.columns + begin;
        std::size_t m = 0;
        for (; m + tile_rows <= rows; m += tile_rows) {
            tile<tile_rows, outputs>(x + m * p.columns, p.columns, w, width, sums + m * outputs * lanes);
        }
        for (; m < rows; ++m) {
            tile<1, outputs>(x + m * p.columns, p.columns, w, width, sums + m * outputs * lanes);
        }
    }
    for (std::size_t m = 0; m < rows; ++m) {
        for (std::size_t r = 0; r < outputs; ++r) {
            store(p, first + m, n + r, V::sum(V::load(sums + (m * outputs + r) * lanes)));
        }
    }
}

template <class Format>
void product(const Product& p) {
    if (p.rows == 1) {
        std::size_t n = p.begin;
        for (; n + 4 <= p.end; n += 4) single<Format, 4>(p, n);
        for (; n < p.end; ++n) single<Format, 1>(p, n);
        return;
    }
    for (std::size_t first = 0; first < p.rows; first += most_rows) {
        const std::size_t rows = p.rows - first < most_rows ? p.rows - first : most_rows;
        std::size_t n = p.begin;
        for (; n + tile_outputs <= p.end; n += tile_outputs) several<Format, tile_outputs>(p, first, rows, n);
        for (; n < p.end; ++n) several<Format, 1>(p, first, rows, n);
    }
}

constexpr Kernels all = {product<Int8>, product<Int4>};

}  // namespace
}  // namespace tierstore::quant_kernels
