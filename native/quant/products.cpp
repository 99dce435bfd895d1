#include "native/quant/products.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "native/base/bf16.hpp"
#include "native/base/float_mode.hpp"
#include "native/quant/kernels.hpp"

namespace tierstore {
namespace {

static_assert(kQuantBlock == quant_kernels::block);

// Below this many bytes of codes times rows of x, waking a thread costs more than it saves.
constexpr std::size_t kWorthWaking = 128 << 10;
// Parts for each thread: one that wakes late finds less left to do.
constexpr std::size_t kPartsPerThread = 4;
// Rows of W in a part: whole tiles, and whole cache lines of y.
constexpr std::size_t kPartRows = 32;

const quant_kernels::Kernels& kernels_of(InstructionSet isa) {
    if (!supports(isa)) throw std::invalid_argument("this machine lacks " + std::string(name(isa)));
    switch (isa) {
        case InstructionSet::Avx512: return quant_kernels::avx512;
        case InstructionSet::Avx2: return quant_kernels::avx2;
        case InstructionSet::Scalar: break;
    }
    return quant_kernels::scalar;
}

struct Free {
    void operator()(float* p) const { std::free(p); }
};
using Lines = std::unique_ptr<float, Free>;

// x in fp32 with zeros up to a whole block, if it is not so already.
Lines widened(const ConstRows& x, std::size_t rows, std::size_t columns, std::size_t padded) {
    if (x.fp32 != nullptr && columns == padded) return nullptr;
    Lines lines(static_cast<float*>(std::aligned_alloc(64, rows * padded * sizeof(float))));
    if (lines == nullptr) throw std::bad_alloc();
    for (std::size_t m = 0; m < rows; ++m) {
        float* to = lines.get() + m * padded;
        for (std::size_t k = 0; k < columns; ++k) {
            to[k] = x.fp32 != nullptr ? x.fp32[m * columns + k] : widen(x.bf16[m * columns + k]);
        }
        std::fill(to + columns, to + padded, 0.0f);
    }
    return lines;
}

// A product in parts, which threads take in turns. One that comes when all are taken leaves it alone.
struct Shared {
    quant_kernels::Product product;
    void (*run)(const quant_kernels::Product&);
    std::size_t part, parts;
    std::atomic<std::size_t> next{0}, done{0};

    void take_parts() {
        const FloatMode mode(FloatMode::Subnormals::Keep);
        for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < parts;) {
            quant_kernels::Product own = product;
            own.begin = i * part;
            own.end = std::min(own.begin + part, product.end);
            run(own);
            if (done.fetch_add(1, std::memory_order_release) + 1 == parts) done.notify_all();
        }
    }
};

}  // namespace

QuantProducts::QuantProducts(std::size_t threads) : threads_(threads), pool_(threads - 1) {}

void QuantProducts::multiply(const Rows& y, const ConstRows& x, std::size_t m, const QuantMatrix& w,
                             std::optional<InstructionSet> isa) {
    const quant_kernels::Kernels& kernels = kernels_of(isa ? *isa : best_instruction_set());
    if (m == 0 || w.rows == 0) return;
    const std::size_t padded = quant_blocks(w.columns) * kQuantBlock;
    const Lines lines = widened(x, m, w.columns, padded);
    auto shared = std::make_shared<Shared>();
    shared->product = {.x = lines ? lines.get() : x.fp32,
                       .rows = m,
                       .columns = padded,
                       .codes = w.codes,
                       .scales = w.scales,
                       .y = y.fp32,
                       .y_bf16 = y.bf16,
                       .y_stride = w.rows,
                       .begin = 0,
                       .end = w.rows};
    shared->run = w.format == QuantFormat::Int8 ? kernels.int8 : kernels.int4;
    const bool alone = threads_ == 1 || quant_code_bytes(w.format, w.rows, w.columns) * m < kWorthWaking;
    const std::size_t wanted = alone ? 1 : threads_ * kPartsPerThread;
    shared->part = ((w.rows + wanted - 1) / wanted + kPartRows - 1) / kPartRows * kPartRows;
    shared->parts = (w.rows + shared->part - 1) / shared->part;
    for (std::size_t i = 1; i < std::min(threads_, shared->parts); ++i) {
        pool_.submit([shared] { shared->take_parts(); });
    }
    shared->take_parts();
    // Threads that still compute a part read what the caller owns.
    for (std::size_t done; (done = shared->done.load(std::memory_order_acquire)) < shared->parts;) {
        shared->done.wait(done, std::memory_order_acquire);
    }
}

}  // namespace tierstore
