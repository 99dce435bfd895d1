// Several threads multiply by quantised matrices through the same threads, each against the scalar kernel alone, while
// pools come and go. Usage: stress_quant [rounds]
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "native/quant/products.hpp"
#include "tests/native/check.hpp"

using namespace tierstore;

namespace {

using Random = std::mt19937;

size_t pick(Random& random, size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random); }

struct Matrix {
    Matrix(Random& random, QuantFormat format_, size_t rows_, size_t columns_)
        : format(format_),
          rows(rows_),
          columns(columns_),
          codes(quant_code_bytes(format_, rows_, columns_)),
          scales(quant_scale_floats(format_, rows_, columns_)) {
        std::normal_distribution<float> normal;
        std::vector<float> weights(rows * columns);
        for (float& w : weights) w = normal(random);
        CHECK(quantize(format, codes.data(), scales.data(), weights.data(), rows, columns));
    }
    QuantMatrix view() const { return {format, codes.data(), scales.data(), rows, columns}; }

    QuantFormat format;
    size_t rows, columns;
    std::vector<std::uint8_t> codes;
    std::vector<float> scales;
};

void caller(QuantProducts& products, QuantProducts& alone, unsigned seed, unsigned rounds) {
    Random random(seed);
    for (unsigned round = 0; round < rounds; ++round) {
        const QuantFormat format = pick(random, 2) == 0 ? QuantFormat::Int8 : QuantFormat::Int4;
        // Most are large enough to be shared.
        const Matrix w(random, format, 1 + pick(random, 2000), 1 + pick(random, 500));
        const size_t m = 1 + pick(random, 5);
        std::vector<float> x(m * w.columns), y(m * w.rows), expected(m * w.rows);
        std::normal_distribution<float> normal;
        for (float& value : x) value = normal(random);
        products.multiply({y.data(), nullptr}, {x.data(), nullptr}, m, w.view());
        alone.multiply({expected.data(), nullptr}, {x.data(), nullptr}, m, w.view(), InstructionSet::Scalar);
        CHECK(std::memcmp(y.data(), expected.data(), y.size() * sizeof(float)) == 0);
    }
}

}  // namespace

int main(int argc, char** argv) {
    const unsigned rounds = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 60;
    for (size_t size : {2u, 4u}) {
        QuantProducts products(size), alone(1);
        std::vector<std::thread> callers;
        for (unsigned i = 0; i < 3; ++i)
            callers.emplace_back(
                [&, i] { caller(products, alone, 10 * i + static_cast<unsigned>(size), rounds); });
        for (std::thread& thread : callers) thread.join();
        products.close();
    }
    Random random(7);
    const Matrix w(random, QuantFormat::Int4, 3000, 200);
    std::vector<float> x(2 * w.columns, 1.0f), y(2 * w.rows);
    for (unsigned i = 0; i < rounds; ++i) {  // a task may still wait in the queue when the product is done
        QuantProducts products(3);
        products.multiply({y.data(), nullptr}, {x.data(), nullptr}, 2, w.view());
    }
}
