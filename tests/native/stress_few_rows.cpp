// Products of a few rows: shared by threads that come and go as one thread makes them, and whose order of summation is
// found again. A processor without the instruction has nothing to check. Usage: stress_few_rows [rounds]
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "native/base/bf16.hpp"
#include "native/torch/few_rows.hpp"
#include "native/torch/sum_order.hpp"
#include "tests/native/check.hpp"

using namespace tierstore;

namespace {

using Random = std::mt19937;
using Values = std::vector<std::uint16_t>;

size_t pick(Random& random, size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random); }

std::uint16_t narrow(float value) { return split_hi(std::bit_cast<std::uint32_t>(value)); }

Values draw(Random& random, size_t count) {
    std::normal_distribution<float> normal;
    Values values(count);
    for (auto& value : values) value = narrow(normal(random));
    return values;
}

// In the place of libgomp.
void parallel(void (*body)(void*), void* data, unsigned threads, unsigned) {
    std::vector<std::thread> others;
    for (unsigned i = 1; i < threads; ++i) others.emplace_back(body, data);
    body(data);
    for (auto& other : others) other.join();
}

void check_threads(Random& random) {
    const size_t n = few_rows_block * (1 + pick(random, 30)), k = few_rows_columns * (1 + pick(random, 20));
    std::vector<Values> x, w, out, expected;
    std::vector<FewRowsProduct> shared, alone;
    for (size_t i = 0, count = 1 + pick(random, 6); i < count; ++i) {
        const size_t rows = 1 + pick(random, few_rows_most), run = few_rows_columns * (1 + pick(random, 20));
        x.push_back(draw(random, rows * k));
        w.push_back(draw(random, n * k));
        out.emplace_back(rows * n);
        expected.emplace_back(rows * n);
        shared.push_back({out[i].data(), x[i].data(), w[i].data(), rows, run});
        alone.push_back({expected[i].data(), x[i].data(), w[i].data(), rows, run});
    }
    multiply_few_rows(shared, n, k, parallel, 4);
    for (const FewRowsProduct& product : alone) multiply_few_rows({&product, 1}, n, k, nullptr, 1);
    CHECK(out == expected);
}

void check_orders() {
    for (size_t rows : {1u, 2u, 8u, 13u}) {
        for (size_t n : {16u, 1040u}) {
            const size_t k = 1504;
            for (size_t run : {64u, 256u, 512u, 1024u, 1504u}) {
                CHECK(find_run(rows, n, k, [&](auto* out, auto* x, auto* w) {
                          const FewRowsProduct product{out, x, w, rows, run};
                          multiply_few_rows({&product, 1}, n, k, nullptr, 1);
                      }) == run);
            }
            CHECK(find_run(rows, n, k, [&](auto* out, auto* x, auto* w) {
                      for (size_t m = 0; m < rows; ++m) {
                          for (size_t i = 0; i < n; ++i) {
                              float sum = 0;
                              for (size_t c = 0; c < k; ++c) sum += widen(x[m * k + c]) * widen(w[i * k + c]);
                              out[m * n + i] = narrow(sum);
                          }
                      }
                  }) == 0);
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (!few_rows_offered()) {
        std::puts("no AVX512_BF16 here");
        return 0;
    }
    const unsigned rounds = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 60;
    Random random(1);
    for (unsigned round = 0; round < rounds; ++round) check_threads(random);
    check_orders();
    return 0;
}
