// What a router that is one matrix would choose, of streams whose way to it is expected: one call instead of a dozen
// small operations of torch, each of which costs more than its arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "native/torch/products.hpp"

namespace tierstore {

// Streams (rows, k), and what is expected to be added to them on their way; null: nothing. Row-major and contiguous.
struct Streams {
    TorchType type;
    std::int64_t rows, k;
    const void* now;
    const void* added;
};

// Adds to counts[e] for how many of the streams row e of w (counts.size(), k) is one of the top_k, at most
// counts.size(), that have the largest products with it; of equal ones the first. Throws std::runtime_error where torch
// refuses a product.
void count_chosen(TorchProducts& torch, const Streams& streams, const void* w, std::int64_t top_k,
                  std::span<std::int64_t> counts);

// mean = decay mean + (1 - decay) (now - before), each of `count` numbers.
void fade_towards(TorchType type, std::size_t count, float decay, void* mean, const void* now,
                  const void* before);

}  // namespace tierstore
