// As in native/quant/kernels.hpp: no standard library but <cstddef> and <cstdint>, definitions in unnamed namespaces.
#include <immintrin.h>

#include "native/torch/few_rows.hpp"

namespace tierstore::few_rows_kernel {
namespace {

constexpr std::size_t kBlock = few_rows_block, kColumns = few_rows_columns;
// Rows of x whose sums fit the registers beside a transposed tile.
constexpr std::size_t kRows = 8;

// 16 rows of 16 pairs of columns -> 16 pairs of columns of 16 rows.
inline void transpose(__m512i (&tile)[16]) {
    __m512i twos[16], fours[16], eights[16];
    for (int i = 0; i < 8; ++i) {
        twos[2 * i] = _mm512_unpacklo_epi32(tile[2 * i], tile[2 * i + 1]);
        twos[2 * i + 1] = _mm512_unpackhi_epi32(tile[2 * i], tile[2 * i + 1]);
    }
    // fours[4 g + c]: rows 4 g to 4 g + 3 of columns c, c + 4, c + 8 and c + 12.
    for (int g = 0; g < 4; ++g) {
        fours[4 * g] = _mm512_unpacklo_epi64(twos[4 * g], twos[4 * g + 2]);
        fours[4 * g + 1] = _mm512_unpackhi_epi64(twos[4 * g], twos[4 * g + 2]);
        fours[4 * g + 2] = _mm512_unpacklo_epi64(twos[4 * g + 1], twos[4 * g + 3]);
        fours[4 * g + 3] = _mm512_unpackhi_epi64(twos[4 * g + 1], twos[4 * g + 3]);
    }
    for (int c = 0; c < 4; ++c) {
        eights[c] = _mm512_shuffle_i32x4(fours[c], fours[4 + c], 0x88);
        eights[4 + c] = _mm512_shuffle_i32x4(fours[c], fours[4 + c], 0xdd);
        eights[8 + c] = _mm512_shuffle_i32x4(fours[8 + c], fours[12 + c], 0x88);
        eights[12 + c] = _mm512_shuffle_i32x4(fours[8 + c], fours[12 + c], 0xdd);
    }
    for (int c = 0; c < 4; ++c) {
        tile[c] = _mm512_shuffle_i32x4(eights[c], eights[8 + c], 0x88);
        tile[4 + c] = _mm512_shuffle_i32x4(eights[4 + c], eights[12 + c], 0x88);
        tile[8 + c] = _mm512_shuffle_i32x4(eights[c], eights[8 + c], 0xdd);
        tile[12 + c] = _mm512_shuffle_i32x4(eights[4 + c], eights[12 + c], 0xdd);
    }
}

inline __m512i two_columns(const std::uint16_t* x) {
    int pair;
    __builtin_memcpy(&pair, x, sizeof pair);
    return _mm512_set1_epi32(pair);
}

// One block of rows of w, times `rows` rows of x. `next`: as much memory, to be prefetched meanwhile.
template <int rows>
void multiply(const FewRowsProduct& p, std::size_t n, std::size_t k, const std::uint16_t* x,
              const std::uint16_t* w, std::uint16_t* out, const std::uint16_t* next) {
    __m512 sums[rows];
    for (std::size_t first = 0; first < k; first += p.run) {
        const std::size_t end = k - first < p.run ? k : first + p.run;
        __m512 run[rows];
        for (auto& sum : run) sum = _mm512_setzero_ps();
        for (std::size_t c = first; c < end; c += kColumns) {
            // The rows of a tile lie far apart, which the processor's own prefetching takes for 16 short streams.
            if (next != nullptr) {
                for (std::size_t i = 0; i < kBlock; ++i)
                    _mm_prefetch(next + c * kBlock + i * kColumns, _MM_HINT_T1);
            }
            __m512i tile[16];
            for (std::size_t i = 0; i < kBlock; ++i) tile[i] = _mm512_loadu_si512(w + i * k + c);
            transpose(tile);
            for (int j = 0; j < 16; ++j) {
                for (int m = 0; m < rows; ++m) {
                    run[m] = _mm512_dpbf16_ps(run[m], (__m512bh)two_columns(x + m * k + c + 2 * j),
                                              (__m512bh)tile[j]);
                }
            }
        }
        for (int m = 0; m < rows; ++m) sums[m] = first == 0 ? run[m] : _mm512_add_ps(sums[m], run[m]);
    }
    for (int m = 0; m < rows; ++m) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + m * n), (__m256i)_mm512_cvtneps_pbh(sums[m]));
    }
}

using Multiply = void (*)(const FewRowsProduct&, std::size_t, std::size_t, const std::uint16_t*,
                          const std::uint16_t*, std::uint16_t*, const std::uint16_t*);
constexpr Multiply by_rows[kRows] = {multiply<1>, multiply<2>, multiply<3>, multiply<4>,
                                     multiply<5>, multiply<6>, multiply<7>, multiply<8>};

}  // namespace

void avx512_bf16(const FewRowsProduct& p, std::size_t n, std::size_t k, std::size_t begin, std::size_t end,
                 const std::uint16_t* next) {
    for (std::size_t row = begin; row < end; row += kBlock) {
        const std::uint16_t* w = p.w + row * k;
        const std::uint16_t* ahead = row + kBlock < end ? w + kBlock * k : next;
        for (std::size_t m = 0; m < p.rows; m += kRows) {
            const std::size_t rows = p.rows - m < kRows ? p.rows - m : kRows;
            by_rows[rows - 1](p, n, k, p.x + m * k, w, p.out + m * n + row, m == 0 ? ahead : nullptr);
        }
    }
}

}  // namespace tierstore::few_rows_kernel
