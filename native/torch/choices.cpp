#include "native/torch/choices.hpp"

#include <algorithm>
#include <bit>
#include <vector>

#include "native/base/bf16.hpp"

namespace tierstore {
namespace {

float read(float value) { return value; }
float read(std::uint16_t bits) { return widen(bits); }
void write(float& to, float value) { to = value; }
void write(std::uint16_t& to, float value) { to = split_hi(std::bit_cast<std::uint32_t>(value)); }

template <class T>
std::vector<T> sums(const T* left, const T* right, std::size_t count) {
    std::vector<T> made(count);
    for (std::size_t i = 0; i < count; ++i) write(made[i], read(left[i]) + read(right[i]));
    return made;
}

// `best`: scratch, the chosen so far with the largest first.
template <class T>
void count_largest(const T* scores, std::size_t top_k, std::vector<std::size_t>& best,
                   std::span<std::int64_t> counts) {
    best.clear();
    for (std::size_t i = 0; i < counts.size(); ++i) {
        const float score = read(scores[i]);
        if (best.size() == top_k && !(score > read(scores[best.back()]))) continue;
        if (best.size() == top_k) best.pop_back();
        std::size_t at = best.size();
        while (at > 0 && score > read(scores[best[at - 1]])) --at;
        best.insert(best.begin() + static_cast<std::ptrdiff_t>(at), i);
    }
    for (const std::size_t i : best) ++counts[i];
}

template <class T>
void count_chosen(TorchProducts& torch, const Streams& streams, const void* w, std::size_t top_k,
                  std::span<std::int64_t> counts) {
    const auto rows = static_cast<std::size_t>(streams.rows), k = static_cast<std::size_t>(streams.k);
    const T* x = static_cast<const T*>(streams.now);
    std::vector<T> expected;
    if (streams.added != nullptr) {
        expected = sums(x, static_cast<const T*>(streams.added), rows * k);
        x = expected.data();
    }
    std::vector<T> scores(rows * counts.size());
    const TorchProduct product{
        .out = scores.data(), .x = const_cast<T*>(x), .w = const_cast<void*>(w), .rows = streams.rows};
    torch.multiply(streams.type, static_cast<std::int64_t>(counts.size()), streams.k, {&product, 1});
    std::vector<std::size_t> best;
    best.reserve(top_k);
    for (std::size_t row = 0; row < rows; ++row) {
        count_largest(&scores[row * counts.size()], top_k, best, counts);
    }
}

template <class T>
void fade_towards(std::size_t count, float decay, T* mean, const T* now, const T* before) {
    for (std::size_t i = 0; i < count; ++i) {
        const float added = read(now[i]) - read(before[i]);
        write(mean[i], added + decay * (read(mean[i]) - added));
    }
}

}  // namespace

void count_chosen(TorchProducts& torch, const Streams& streams, const void* w, std::int64_t top_k,
                  std::span<std::int64_t> counts) {
    const std::size_t most = std::min(static_cast<std::size_t>(top_k), counts.size());
    if (most == 0) return;
    if (streams.type == TorchType::BF16) {
        count_chosen<std::uint16_t>(torch, streams, w, most, counts);
    } else {
        count_chosen<float>(torch, streams, w, most, counts);
    }
}

void fade_towards(TorchType type, std::size_t count, float decay, void* mean, const void* now,
                  const void* before) {
    if (type == TorchType::BF16) {
        fade_towards(count, decay, static_cast<std::uint16_t*>(mean), static_cast<const std::uint16_t*>(now),
                     static_cast<const std::uint16_t*>(before));
    } else {
        fade_towards(count, decay, static_cast<float*>(mean), static_cast<const float*>(now),
                     static_cast<const float*>(before));
    }
}

}  // namespace tierstore
