// The position of a program in its walk through the layers.
#pragma once

#include <cstdint>
#include <vector>

#include "native/cache/policy.hpp"

namespace tierstore {

// A program passes its layers forward, 0 to L - 1, and then, if it trains, backward. Passes are numbered within one
// such cycle: layer l is passed at l, and backward at 2L - 1 - l. Whether there is a backward half is learned from the
// accesses. Layers are counted in their order, whatever their numbers.
class LayerCycle {
public:
    enum class Pass : std::uint8_t {
        FORWARD,
        AGAIN,  // forward again just before its backward pass: recomputation of activations
        BACKWARD,
        NONE,  // not part of the walk
    };

    void add_layer(std::uint32_t layer);
    // Classifies this access and moves the position there.
    Pass enter(Phase phase, std::uint32_t layer);

    bool trains() const { return trains_; }
    std::uint32_t layers() const { return layers_; }
    std::uint32_t length() const { return trains_ ? 2 * layers_ : layers_; }
    std::uint32_t rank(std::uint32_t layer) const { return rank_[layer]; }
    bool has_layer(std::uint32_t layer) const { return layer < rank_.size() && rank_[layer] != kNone; }
    // The pass that the program is in, from 0 to length() - 1.
    std::uint32_t position() const { return position_ % length(); }
    // Changes whenever trains() or a rank changes.
    std::uint32_t version() const { return version_; }

    // Passes until the next one of `layer`, from 1 to length(): its forward pass, and its backward pass.
    std::uint32_t to_forward(std::uint32_t layer) const { return until(rank_[layer]); }
    std::uint32_t to_backward(std::uint32_t layer) const { return until(2 * layers_ - 1 - rank_[layer]); }

private:
    static constexpr std::uint32_t kNone = ~0u;

    std::uint32_t until(std::uint32_t pass) const {
        const std::uint32_t cycle = length();
        const std::uint32_t ahead = (pass + cycle - position_ % cycle) % cycle;
        return ahead == 0 ? cycle : ahead;
    }
    void set_trains(bool trains);

    bool trains_ = false;
    std::uint32_t layers_ = 0;
    std::uint32_t version_ = 0;
    std::uint32_t position_ = 0;
    std::vector<std::uint32_t> rank_;  // by layer
    Pass last_ = Pass::NONE;
    std::uint32_t last_layer_ = 0;
};

}  // namespace tierstore
