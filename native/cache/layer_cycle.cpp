#include "native/cache/layer_cycle.hpp"

namespace tierstore {

void LayerCycle::add_layer(std::uint32_t layer) {
    if (has_layer(layer)) return;
    if (layer >= rank_.size()) rank_.resize(layer + 1, kNone);
    rank_[layer] = 0;
    layers_ = 0;
    for (std::uint32_t& rank : rank_) {
        if (rank != kNone) rank = layers_++;
    }
    ++version_;
}

void LayerCycle::set_trains(bool trains) {
    if (trains_ == trains) return;
    trains_ = trains;
    ++version_;
}

LayerCycle::Pass LayerCycle::enter(Phase phase, std::uint32_t layer) {
    Pass pass = Pass::NONE;
    if (phase == Phase::FORWARD || phase == Phase::USER) {
        const bool up = last_ == Pass::FORWARD || last_ == Pass::AGAIN;
        const bool again =
            trains_ && ((up && last_layer_ == layer) || (last_ == Pass::BACKWARD && last_layer_ > layer));
        pass = again ? Pass::AGAIN : Pass::FORWARD;
    } else if (phase == Phase::BACKWARD) {
        pass = Pass::BACKWARD;
    }
    if (pass == Pass::NONE) return pass;
    add_layer(layer);
    if (pass == Pass::BACKWARD) set_trains(true);
    // Forward again from the start, and no backward pass since.
    if (pass == Pass::FORWARD && last_ == Pass::FORWARD && layer <= last_layer_) set_trains(false);
    position_ = pass == Pass::FORWARD ? rank(layer) : 2 * layers_ - 1 - rank(layer);
    last_ = pass;
    last_layer_ = layer;
    return pass;
}

}  // namespace tierstore
