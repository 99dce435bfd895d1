#include "native/cache/policies/lfu_decay.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace tierstore {
namespace {

constexpr double kMostUnit = 0x1p500;

}  // namespace

double half_life(double beta, double interval) {
    if (beta >= 1.0) return std::numeric_limits<double>::infinity();
    return interval * std::log(0.5) / std::log(beta);
}

double beta_for_half_life(double half_life, double interval) {
    return std::isinf(half_life) ? 1.0 : std::exp2(-interval / half_life);
}

LfuDecayOptions read_lfu_decay_options(const PolicyOptions& options) {
    OptionReader reader("lfu-decay", options);
    LfuDecayOptions read;
    const std::string variant = reader.text("variant", "corrected");
    if (variant == "paper") {
        read.variant = LfuVariant::PAPER;
    } else if (variant != "corrected") {
        reader.refuse("variant", "'paper' or 'corrected', got '" + variant + "'");
    }
    read.threshold = reader.number("threshold", read.threshold);
    if (!(read.threshold >= 0.0) || std::isinf(read.threshold)) reader.refuse("threshold", "a number >= 0");
    const double interval = reader.number("interval", static_cast<double>(read.interval));
    if (!(interval >= 1.0) || interval != std::floor(interval) || interval > 1e15) {
        reader.refuse("interval", "a whole number >= 1");
    }
    read.interval = static_cast<std::uint64_t>(interval);
    if (reader.has("half_life") && reader.has("beta")) reader.refuse("half_life", "either it or 'beta'");
    const bool by_half_life = reader.has("half_life");
    const double half = reader.number("half_life", half_life(read.beta, interval));
    read.beta = reader.number("beta", by_half_life ? beta_for_half_life(half, interval) : read.beta);
    if (by_half_life && !(half > 0.0 && read.beta >= kLeastBeta)) {
        reader.refuse("half_life", "a number > 0, at least a 500th of the interval");
    }
    if (!(read.beta >= kLeastBeta && read.beta <= 1.0)) {
        reader.refuse("beta", "a number above 0 (2^-500 at least) and at most 1");
    }
    read.remember = reader.whole_in("remember", 0, 0, 1) == 1;
    reader.finish();
    return read;
}

LfuDecay::LfuDecay(const LfuDecayOptions& options)
    : Policy(options.variant == LfuVariant::PAPER ? 1 : 0), options_(options), floor_(options.threshold) {}

void LfuDecay::push(EntryId entry) {
    Entry& of = entries_[entry];
    of.place = of.score >= floor_ ? READY : COLD;
    (of.place == READY ? ready_ : cold_).push(ScoreHeap::Node{of.score, entry, ++of.stamp});
    ++live_;
}

void LfuDecay::insert(EntryId entry) {
    if (entry >= entries_.size()) entries_.resize(entry + entry / 2 + 1);
    Entry& of = entries_[entry];
    of.score = options_.remember ? of.score + unit_ : unit_;
    push(entry);
}

void LfuDecay::hit(EntryId entry) {
    Entry& of = entries_[entry];
    of.score += unit_;
    if (of.place != COLD || of.score < floor_) return;
    --live_;
    push(entry);
    trim();
}

void LfuDecay::remove(EntryId entry) {
    Entry& of = entries_[entry];
    if (of.place != NAMED) {
        ++of.stamp;
        --live_;
        trim();
    }
    of.place = NOWHERE;
}

void LfuDecay::tick(Clock clock) {
    const Clock mine = options_.variant == LfuVariant::PAPER ? Clock::REQUEST : Clock::STEP;
    if (clock != mine || ++elapsed_ < options_.interval) return;
    elapsed_ = 0;
    if (options_.beta < 1.0) decay();
}

void LfuDecay::decay() {
    unit_ /= options_.beta;
    if (unit_ >= kMostUnit) rescale();
    floor_ = options_.threshold * unit_;
}

// Scores so old that they vanish become ties, which the entry breaks: hence new heaps.
void LfuDecay::rescale() {
    unit_ /= kMostUnit;
    for (Entry& entry : entries_) entry.score /= kMostUnit;
    for (ScoreHeap* heap : {&ready_, &cold_}) {
        heap->rebuild([this](ScoreHeap::Node& node) {
            node.score = entries_[node.entry].score;
            return node.stamp == entries_[node.entry].stamp;
        });
    }
}

// Nodes that are out of date leave when they reach the top; those that never would are cleared away.
void LfuDecay::trim() {
    constexpr std::size_t kSpare = 64;
    if (ready_.size() + cold_.size() <= 2 * live_ + kSpare) return;
    for (ScoreHeap* heap : {&ready_, &cold_}) {
        heap->rebuild(
            [this](const ScoreHeap::Node& node) { return node.stamp == entries_[node.entry].stamp; });
    }
}

// Brings the top up to date. False when the heap is empty.
bool LfuDecay::settle(ScoreHeap& heap) {
    while (!heap.empty()) {
        const ScoreHeap::Node& top = heap.top();
        const Entry& of = entries_[top.entry];
        if (top.stamp != of.stamp) {
            heap.pop();
        } else if (top.score < of.score) {
            heap.raise_top(of.score);
        } else {
            return true;
        }
    }
    return false;
}

// What has decayed below the threshold since the last choice becomes cold.
void LfuDecay::settle_ready() {
    while (settle(ready_) && ready_.top().score < floor_) {
        const EntryId entry = ready_.top().entry;
        ready_.pop();
        --live_;
        push(entry);
    }
}

// The top of a settled heap becomes a victim, if it can go; returns whether it did.
bool LfuDecay::take(ScoreHeap& heap, Choice& choice) {
    const EntryId entry = heap.top().entry;
    heap.pop();
    --live_;
    if (!choice.candidates.evictable(entry)) {
        busy_.push_back(entry);
        return false;
    }
    entries_[entry].place = NAMED;
    named_.push_back(entry);
    choice.victims.push_back(entry);
    choice.freed += choice.candidates.frames[entry];
    return true;
}

// Below the threshold nothing qualifies: the smallest goes, one at a time.
void LfuDecay::take_cold(Choice& choice) {
    while (!choice.done() && settle(cold_)) choice.starved += take(cold_, choice) ? 1 : 0;
}

void LfuDecay::choose_corrected(Choice& choice) {
    while (!choice.done() && settle(ready_)) take(ready_, choice);
    take_cold(choice);
}

void LfuDecay::choose_paper(Choice& choice) {
    take_cold(choice);
    while (!choice.done() && settle(ready_)) {
        const double least = ready_.top().score;
        if (!take(ready_, choice)) continue;
        while (settle(ready_) && ready_.top().score == least) take(ready_, choice);
    }
}

std::uint64_t LfuDecay::select(const Candidates& candidates, std::uint64_t frames,
                               std::vector<EntryId>& victims) {
    for (const EntryId entry : named_) {
        if (entries_[entry].place == NAMED) push(entry);  // named, and stayed
    }
    named_.clear();
    settle_ready();
    Choice choice{candidates, victims, frames};
    if (options_.variant == LfuVariant::PAPER) {
        choose_paper(choice);
    } else {
        choose_corrected(choice);
    }
    for (const EntryId entry : busy_) push(entry);
    busy_.clear();
    return choice.starved;
}

std::unique_ptr<Policy> make_lfu_decay(const PolicyOptions& options) {
    return std::make_unique<LfuDecay>(read_lfu_decay_options(options));
}

}  // namespace tierstore
