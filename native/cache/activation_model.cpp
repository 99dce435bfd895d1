#include "native/cache/activation_model.hpp"

#include <algorithm>
#include <cmath>

namespace tierstore {
namespace {

// How fast the two halves of a state fade: half after so many passes. Tuned on one half of a routing trace of 26 layers.
constexpr double kFastHalfLife = 6.0, kSlowHalfLife = 40.0;
constexpr float kSlowWeight = 0.3F;     // of a vector in the slow half, which adds up many more
constexpr float kFirstVectors = 0.17F;  // their largest number
constexpr float kVectorRate = 0.1F;     // of the rate
constexpr float kFeatureRate = 0.2F;
constexpr float kPriorRate = 5e-4F;
constexpr float kPriorWeight = 2.0F;      // of the prior in a sequence's frequency, in passes
constexpr float kPairPrior = 10.0F;       // of the prior in a count of pairs, in uses
constexpr std::size_t kMostPairs = 1024;  // places of a layer: beyond, no pairs are counted

enum Feature : std::uint8_t { ONE, OWN, ALL, NOW, NEXT };

float log_odds(float chance) {
    const float held = std::clamp(chance, 1e-3F, 1.0F - 1e-3F);
    return std::log(held / (1.0F - held));
}

float logistic(float value) { return 1.0F / (1.0F + std::exp(-value)); }

// Numbers that look random, the same on every machine (SplitMix64, Steele et al. 2014).
float scattered(std::uint64_t number) {
    std::uint64_t bits = (number + 1) * 0x9e3779b97f4a7c15ULL;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9ULL;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebULL;
    bits ^= bits >> 31;
    return static_cast<float>(static_cast<std::int64_t>(bits >> 40) - (1 << 23)) /
           static_cast<float>(1 << 23);
}

const float kFastFade = static_cast<float>(std::exp2(-1.0 / kFastHalfLife));
const float kSlowFade = static_cast<float>(std::exp2(-1.0 / kSlowHalfLife));

}  // namespace

ActivationModel::ActivationModel(const ActivationOptions& options)
    : decay_(static_cast<float>(std::exp2(-1.0 / options.half_life))),
      rate_(static_cast<float>(options.rate)),
      weights_{0.0F, 0.6F, 0.3F, 0.0F, 0.5F} {}

void ActivationModel::add_place(std::uint32_t number) {
    if (number >= layers_.size()) {
        layers_.resize(number + 1);
        for (auto& layers : seen_) layers.resize(number + 1);
    }
    Layer& layer = layers_[number];
    const std::size_t size = ++layer.size;
    for (std::size_t i = 0; i < kRank; ++i) {
        const std::uint64_t cell = (static_cast<std::uint64_t>(number) << 32 | (size - 1)) * kRank + i;
        layer.vectors.push_back(kFirstVectors * scattered(cell));
    }
    layer.prior.push_back(0.1F);
    layer.firsts.push_back(0.0F);
    // What was learned by place has another shape now: places come before passes, or a layer begins again.
    layer.outputs.clear();
    layer.pairs.clear();
    for (auto& layers : seen_) layers[number] = Seen{};
}

void ActivationModel::forget(std::uint32_t sequence) {
    state_[sequence] = State{};
    for (Seen& seen : seen_[sequence]) {
        std::fill(seen.uses.begin(), seen.uses.end(), 0.0F);
        seen.used.clear();
        seen.before.clear();
        seen.passes = 0.0F;
        seen.any = false;
    }
}

void ActivationModel::size_up(Seen& seen, const Layer& layer) const {
    if (seen.uses.size() == layer.size) return;
    seen.uses.assign(layer.size, 0.0F);
    seen.chance.assign(layer.size, 0.0F);
    for (auto& feature : seen.features) feature.assign(layer.size, 0.0F);
    std::fill(seen.features[ONE].begin(), seen.features[ONE].end(), 1.0F);
}

void ActivationModel::pass(std::uint32_t sequence, std::uint32_t number,
                           std::span<const std::uint32_t> used) {
    Layer& layer = layers_[number];
    if (layer.outputs.empty()) {
        layer.outputs.assign(kState * layer.size, 0.0F);
        if (layer.size <= kMostPairs) layer.pairs.assign(layer.size * layer.size, 0.0F);
    }
    Seen& now = seen(sequence, number);
    size_up(now, layer);
    if (now.any) {
        learn(sequence, number, used);
        count_pairs(now, layer, used);
    }
    for (float& prior : layer.prior) prior -= kPriorRate * prior;
    for (float& uses : now.uses) uses *= decay_;
    now.passes = decay_ * now.passes + 1.0F;
    State& state = state_[sequence];
    for (std::size_t i = 0; i < kRank; ++i) state[i] *= kFastFade;
    for (std::size_t i = kRank; i < kState; ++i) state[i] *= kSlowFade;
    for (const std::uint32_t place : used) {
        layer.prior[place] += kPriorRate;
        now.uses[place] += 1.0F;
        const float* const vector = &layer.vectors[place * kRank];
        for (std::size_t i = 0; i < kRank; ++i) {
            state[i] += vector[i];
            state[kRank + i] += kSlowWeight * vector[i];
        }
    }
    std::swap(now.before, now.used);
    now.used.assign(used.begin(), used.end());
    now.state = state;
    now.any = true;
    predict(now, layer);
}

// From the features that the last pass of this layer left, and what it has used now.
void ActivationModel::learn(std::uint32_t sequence, std::uint32_t number,
                            std::span<const std::uint32_t> used) {
    Layer& layer = layers_[number];
    Seen& last = seen(sequence, number);
    const std::size_t size = layer.size;
    score(last, layer);  // with what has been learned since
    errors_.resize(size);
    for (std::size_t e = 0; e < size; ++e) errors_[e] = -logistic(logits_[e]);
    for (const std::uint32_t place : used) errors_[place] += 1.0F;
    float length = 1.0F;
    for (const float value : last.state) length += value * value;
    const float step = rate_ / std::sqrt(length);
    State gradient{};
    for (std::size_t i = 0; i < kState; ++i) {
        float* const outputs = &layer.outputs[i * size];
        float sum = 0.0F;
        for (std::size_t e = 0; e < size; ++e) sum += errors_[e] * outputs[e];
        gradient[i] = sum;
        const float by = step * last.state[i];
        for (std::size_t e = 0; e < size; ++e) outputs[e] += by * errors_[e];
    }
    for (std::size_t f = 0; f < kFeatures; ++f) {
        float sum = 0.0F;
        for (std::size_t e = 0; e < size; ++e) sum += errors_[e] * last.features[f][e];
        sum /= static_cast<float>(size);
        squares_[f] += sum * sum;
        weights_[f] += kFeatureRate * sum / (std::sqrt(squares_[f]) + 1e-6F);
    }
    learn_vectors(sequence, number, gradient);
}

// The vectors that were added to the state within the token that the prediction was made from.
void ActivationModel::learn_vectors(std::uint32_t sequence, std::uint32_t number, const State& gradient) {
    const float step = kVectorRate * rate_;
    float fast = 1.0F;
    float slow = 1.0F;
    std::array<float, kRank> change{};
    for (std::uint32_t at = number + 1; at-- > 0;) {
        Layer& layer = layers_[at];
        if (layer.size == 0) continue;
        // Layers before this one have passed the next token already.
        const Seen& of = seen(sequence, at);
        for (std::size_t i = 0; i < kRank; ++i) {
            change[i] = step * (fast * gradient[i] + slow * gradient[kRank + i]);
        }
        for (const std::uint32_t place : at == number ? of.used : of.before) {
            float* const vector = &layer.vectors[place * kRank];
            for (std::size_t i = 0; i < kRank; ++i) vector[i] += change[i];
        }
        fast *= kFastFade;
        slow *= kSlowFade;
    }
}

void ActivationModel::count_pairs(const Seen& seen, Layer& layer, std::span<const std::uint32_t> used) {
    if (layer.pairs.empty()) return;
    for (const std::uint32_t first : seen.used) {
        layer.firsts[first] += 1.0F;
        for (const std::uint32_t place : used) layer.pairs[first * layer.size + place] += 1.0F;
    }
}

void ActivationModel::predict(Seen& seen, const Layer& layer) {
    const std::size_t size = layer.size;
    std::vector<float>& next = seen.features[NEXT];
    std::fill(next.begin(), next.end(), 0.0F);
    std::fill(seen.features[NOW].begin(), seen.features[NOW].end(), 0.0F);
    for (const std::uint32_t place : seen.used) seen.features[NOW][place] = 1.0F;
    if (!layer.pairs.empty()) {
        for (const std::uint32_t first : seen.used) {
            const float part = 1.0F / (layer.firsts[first] + kPairPrior);
            const float* const pairs = &layer.pairs[first * size];
            for (std::size_t e = 0; e < size; ++e) next[e] += (pairs[e] + kPairPrior * layer.prior[e]) * part;
        }
    }
    const auto count = static_cast<float>(seen.used.size());
    for (std::size_t e = 0; e < size; ++e) {
        const float all = log_odds(layer.prior[e]);
        seen.features[ALL][e] = all;
        seen.features[OWN][e] =
            log_odds((seen.uses[e] + kPriorWeight * layer.prior[e]) / (seen.passes + kPriorWeight));
        next[e] = layer.pairs.empty() ? 0.0F : log_odds(next[e] / count) - all;
    }
    score(seen, layer);
    for (std::size_t e = 0; e < size; ++e) seen.chance[e] = logistic(logits_[e]);
}

void ActivationModel::score(const Seen& seen, const Layer& layer) {
    const std::size_t size = layer.size;
    logits_.assign(size, 0.0F);
    for (std::size_t f = 0; f < kFeatures; ++f) {
        const float weight = weights_[f];
        const float* const feature = seen.features[f].data();
        for (std::size_t e = 0; e < size; ++e) logits_[e] += weight * feature[e];
    }
    for (std::size_t i = 0; i < kState; ++i) {
        const float state = seen.state[i];
        const float* const outputs = &layer.outputs[i * size];
        for (std::size_t e = 0; e < size; ++e) logits_[e] += state * outputs[e];
    }
}

std::span<const float> ActivationModel::chances(std::uint32_t sequence, std::uint32_t layer) const {
    return seen_[sequence][layer].chance;
}

float ActivationModel::frequency(std::uint32_t sequence, std::uint32_t layer, std::uint32_t place) const {
    const Seen& seen = seen_[sequence][layer];
    return (seen.uses[place] + kPriorWeight * layers_[layer].prior[place]) / (seen.passes + kPriorWeight);
}

}  // namespace tierstore
