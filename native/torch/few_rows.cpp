#include "native/torch/few_rows.hpp"

#include <algorithm>
#include <atomic>

#include "native/base/cpu.hpp"

namespace tierstore {
namespace {

// Rows of w in a part: long enough to be read in a stream, short enough that a thread which wakes late finds less to
// do.
constexpr std::size_t kPartRows = 64;
// Below this many bytes of matrices, waking a thread costs more than it saves.
constexpr std::size_t kWorthWaking = 128 << 10;

struct Shared {
    std::span<const FewRowsProduct> products;
    std::size_t n, k, parts_each, parts;
    std::atomic<std::size_t> next{0};

    // A part is taken while the one before is computed, so that its memory can be prefetched.
    void take_parts() {
        std::size_t part = next.fetch_add(1, std::memory_order_relaxed);
        while (part < parts) {
            const std::size_t after = next.fetch_add(1, std::memory_order_relaxed);
            few_rows_kernel::avx512_bf16(product(part), n, k, begin(part),
                                         std::min(begin(part) + kPartRows, n),
                                         after < parts ? product(after).w + begin(after) * k : nullptr);
            part = after;
        }
    }

    const FewRowsProduct& product(std::size_t part) const { return products[part / parts_each]; }
    std::size_t begin(std::size_t part) const { return part % parts_each * kPartRows; }
};

}  // namespace

bool few_rows_offered() { return best_instruction_set() == InstructionSet::Avx512 && supports_avx512_bf16(); }

void multiply_few_rows(std::span<const FewRowsProduct> products, std::size_t n, std::size_t k,
                       Parallel parallel, unsigned threads) {
    Shared shared{
        .products = products, .n = n, .k = k, .parts_each = (n + kPartRows - 1) / kPartRows, .parts = 0};
    shared.parts = shared.parts_each * products.size();
    const auto body = [](void* data) { static_cast<Shared*>(data)->take_parts(); };
    // Never on some of the threads: libgomp ends those that a region leaves out, and starts them again for the next.
    if (threads == 1 || shared.parts == 1 || products.size() * n * k * sizeof(std::uint16_t) < kWorthWaking) {
        body(&shared);
    } else {
        parallel(body, &shared, threads, 0);
    }
}

}  // namespace tierstore
