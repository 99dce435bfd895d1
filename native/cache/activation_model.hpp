// Which records of a layer each sequence will use in its next pass, learned online.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace tierstore {

struct ActivationOptions {
    double half_life = 24.0;  // passes of a layer after which a use counts half in a sequence's history
    double rate = 0.02;       // learning rate
};

// A logistic model of one use: for sequence s and place e (of the n in layer l),
//     logit P(used in the next pass of l) = w . x + V[l][e] . state[s]
// The features x are: 1; the log-odds of the sequence's own decayed frequency of e, and of all sequences'; whether the
// present pass used e; how much likelier than on average e was in the past, one pass of l after the places used now
// (counts of pairs, summed over all sequences).
// The state summarises what the sequence's passes have used in all layers so far, for this token and those before: each
// place of each layer has a vector of kRank numbers, and the state is their sum, which fades per pass at two speeds.
// What the early layers use almost identifies the token, so later tokens and later layers follow from it; most of the
// information is there (docs/RESULTS.md). Vectors, V and w are learned by gradient steps on the log loss whenever the
// requests of a layer are known; w by Adagrad (Duchi et al. 2011).
// All in float, in one fixed order, without randomness: the same calls give the same numbers.
// With n places in a layer and k used by a sequence, a pass costs O(n kRank + k kRank L) per sequence.
class ActivationModel {
public:
    static constexpr std::size_t kSequences = 8;
    static constexpr std::size_t kRank = 32;

    explicit ActivationModel(const ActivationOptions& options);

    // Adds a place to layer `layer`. The program passes through the layers in turn.
    void add_place(std::uint32_t layer);
    std::uint32_t places(std::uint32_t layer) const {
        return static_cast<std::uint32_t>(layers_[layer].size);
    }
    // Forgets the sequence: its number is reused by another one.
    void forget(std::uint32_t sequence);
    // `sequence` has used `used` (ascending places, at least one) in the pass of `layer`: learns from it, and predicts
    // the next pass of this layer.
    void pass(std::uint32_t sequence, std::uint32_t layer, std::span<const std::uint32_t> used);
    // P(used in the next pass of `layer`) by place, as of the sequence's last pass of it.
    std::span<const float> chances(std::uint32_t sequence, std::uint32_t layer) const;
    // The sequence's decayed frequency of a place, pulled towards that of all sequences.
    float frequency(std::uint32_t sequence, std::uint32_t layer, std::uint32_t place) const;

private:
    static constexpr std::size_t kState = 2 * kRank;
    static constexpr std::size_t kFeatures = 5;
    using State = std::array<float, kState>;

    // What one sequence has shown of one layer.
    struct Seen {
        std::vector<float> uses;                             // decayed, by place
        std::array<std::vector<float>, kFeatures> features;  // by place
        std::vector<float> chance;                           // by place
        std::vector<std::uint32_t> used, before;             // by the last pass, and the one before it
        State state{};                                       // after the last pass
        float passes = 0.0F;                                 // decayed
        bool any = false;
    };
    struct Layer {
        std::size_t size = 0;
        std::vector<float> vectors;  // [size][kRank]
        std::vector<float> outputs;  // [kState][size]
        std::vector<float> prior;    // all sequences' frequency
        std::vector<float> pairs;   // [size][size]: the first used, then the other in the next pass; or empty
        std::vector<float> firsts;  // how often each was the first of a pair
    };

    Seen& seen(std::uint32_t sequence, std::uint32_t layer) { return seen_[sequence][layer]; }
    void size_up(Seen& seen, const Layer& layer) const;
    void learn(std::uint32_t sequence, std::uint32_t number, std::span<const std::uint32_t> used);
    void learn_vectors(std::uint32_t sequence, std::uint32_t number, const State& gradient);
    void count_pairs(const Seen& seen, Layer& layer, std::span<const std::uint32_t> used);
    void predict(Seen& seen, const Layer& layer);
    void score(const Seen& seen, const Layer& layer);

    float decay_, rate_;
    std::vector<Layer> layers_;
    std::array<std::vector<Seen>, kSequences> seen_;
    std::array<State, kSequences> state_{};
    std::array<float, kFeatures> weights_;
    std::array<float, kFeatures> squares_{};  // Adagrad's, of weights_
    std::vector<float> logits_, errors_;      // scratch, by place
};

}  // namespace tierstore
