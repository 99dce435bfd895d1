// What a router that is one matrix would choose for streams with an expected addition: one call instead of a dozen
// small operations of torch, each of which costs more than its arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "native/torch/products.hpp"

namespace tierstore {

// Streams (rows, k), and what is expected to be added to them; null: nothing. Row-major and contiguous.
struct Streams {
    TorchType type;
    std::int64_t rows, k;
    const void* now;
    const void* added;
};

// For each row e of w (counts.size(), k), adds to counts[e] the number of streams for which e has one of the top_k (at
// most counts.size()) largest products; ties go to the first. Throws std::runtime_error if torch refuses a product.
void count_chosen(TorchProducts& torch, const Streams& streams, const void* w, std::int64_t top_k,
                  std::span<std::int64_t> counts);

// mean = decay mean + (1 - decay) (now - before), each of `count` numbers.
void fade_towards(TorchType type, std::size_t count, float decay, void* mean, const void* now,
                  const void* before);

}  // namespace tierstore
