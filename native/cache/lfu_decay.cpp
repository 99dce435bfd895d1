#include "native/cache/lfu_decay.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace tierstore {

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
    const double half = reader.number("half_life", half_life(read.beta, interval));
    if (!(half > 0.0)) reader.refuse("half_life", "a number > 0");
    read.beta =
        reader.number("beta", reader.has("half_life") ? beta_for_half_life(half, interval) : read.beta);
    if (!(read.beta > 0.0 && read.beta <= 1.0)) reader.refuse("beta", "a number above 0 and at most 1");
    reader.finish();
    return read;
}

LfuDecay::LfuDecay(const LfuDecayOptions& options)
    : Policy(options.variant == LfuVariant::PAPER ? 1 : 0), options_(options) {}

std::uint32_t LfuDecay::sift_up(Heap& heap, std::uint32_t at) {
    const EntryId entry = heap[at];
    while (at > 0) {
        const std::uint32_t parent = (at - 1) / 2;
        if (!before(entry, heap[parent])) break;
        heap[at] = heap[parent];
        slot_[heap[at]] = at;
        at = parent;
    }
    heap[at] = entry;
    slot_[entry] = at;
    return at;
}

void LfuDecay::sift_down(Heap& heap, std::uint32_t at) {
    const EntryId entry = heap[at];
    const auto size = static_cast<std::uint32_t>(heap.size());
    for (;;) {
        std::uint32_t child = 2 * at + 1;
        if (child >= size) break;
        if (child + 1 < size && before(heap[child + 1], heap[child])) ++child;
        if (!before(heap[child], entry)) break;
        heap[at] = heap[child];
        slot_[heap[at]] = at;
        at = child;
    }
    heap[at] = entry;
    slot_[entry] = at;
}

void LfuDecay::push(EntryId entry) {
    Heap& heap = heap_of(entry);
    heap.push_back(entry);
    sift_up(heap, static_cast<std::uint32_t>(heap.size() - 1));
}

void LfuDecay::take_out(Heap& heap, std::uint32_t at) {
    const EntryId last = heap.back();
    heap.pop_back();
    if (at == heap.size()) return;
    heap[at] = last;
    sift_down(heap, sift_up(heap, at));
}

void LfuDecay::insert(EntryId entry) {
    if (entry >= hits_.size()) {
        hits_.resize(entry + entry / 2 + 1, 0.0);
        slot_.resize(hits_.size(), 0);
    }
    hits_[entry] = 1.0;
    push(entry);
}

void LfuDecay::hit(EntryId entry) {
    Heap& from = heap_of(entry);
    const std::uint32_t at = slot_[entry];
    if (&from == &cold_ && hits_[entry] + 1.0 >= options_.threshold) {
        take_out(from, at);
        hits_[entry] += 1.0;
        push(entry);
        return;
    }
    hits_[entry] += 1.0;
    sift_down(from, at);
}

void LfuDecay::remove(EntryId entry) { take_out(heap_of(entry), slot_[entry]); }

void LfuDecay::tick(Clock clock) {
    const Clock mine = options_.variant == LfuVariant::PAPER ? Clock::REQUEST : Clock::STEP;
    if (clock != mine || ++elapsed_ < options_.interval) return;
    elapsed_ = 0;
    if (options_.beta < 1.0) decay();
}

void LfuDecay::decay() {
    // Each count is multiplied, as in the algorithm: a factor kept aside would round differently. Rounding
    // can make ties, which the entry number then breaks, so the heaps are ordered again.
    Heap all;
    all.reserve(ready_.size() + cold_.size());
    all.insert(all.end(), cold_.begin(), cold_.end());
    all.insert(all.end(), ready_.begin(), ready_.end());
    ready_.clear();
    cold_.clear();
    for (const EntryId entry : all) {
        hits_[entry] *= options_.beta;
        Heap& heap = heap_of(entry);
        slot_[entry] = static_cast<std::uint32_t>(heap.size());
        heap.push_back(entry);
    }
    for (Heap* heap : {&ready_, &cold_}) {
        for (auto at = static_cast<std::uint32_t>(heap->size() / 2); at-- > 0;) sift_down(*heap, at);
    }
}

LfuDecay::Ascent::Ascent(const LfuDecay& policy, const Heap& heap, std::vector<std::uint32_t>& frontier)
    : policy_(policy), heap_(heap), frontier_(frontier) {
    frontier_.clear();
    if (!heap_.empty()) frontier_.push_back(0);
}

EntryId LfuDecay::Ascent::next() {
    const auto after = [this](std::uint32_t a, std::uint32_t b) { return later(a, b); };
    std::pop_heap(frontier_.begin(), frontier_.end(), after);
    const std::uint32_t at = frontier_.back();
    frontier_.pop_back();
    for (std::uint32_t child = 2 * at + 1; child <= 2 * at + 2 && child < heap_.size(); ++child) {
        frontier_.push_back(child);
        std::push_heap(frontier_.begin(), frontier_.end(), after);
    }
    return heap_[at];
}

std::uint64_t LfuDecay::select(const Candidates& candidates, std::uint64_t frames,
                               std::vector<EntryId>& victims) {
    if (options_.variant == LfuVariant::PAPER) return select_paper(candidates, frames, victims);
    std::uint64_t freed = 0;
    std::uint64_t starved = 0;
    for (const Heap* heap : {&ready_, &cold_}) {
        for (Ascent ascent(*this, *heap, frontier_); !ascent.done() && freed < frames;) {
            const EntryId entry = ascent.next();
            if (!candidates.evictable(entry)) continue;
            victims.push_back(entry);
            freed += candidates.frames[entry];
            starved += heap == &cold_ ? 1 : 0;
        }
    }
    return starved;
}

std::uint64_t LfuDecay::select_paper(const Candidates& candidates, std::uint64_t frames,
                                     std::vector<EntryId>& victims) const {
    std::uint64_t freed = 0;
    std::uint64_t starved = 0;
    const auto take = [&](EntryId entry) {
        victims.push_back(entry);
        freed += candidates.frames[entry];
    };
    // Below the threshold nothing qualifies: the smallest goes, one at a time.
    for (Ascent ascent(*this, cold_, frontier_); !ascent.done() && freed < frames;) {
        const EntryId entry = ascent.next();
        if (!candidates.evictable(entry)) continue;
        take(entry);
        ++starved;
    }
    for (Ascent ascent(*this, ready_, frontier_); !ascent.done() && freed < frames;) {
        const EntryId entry = ascent.next();
        if (!candidates.evictable(entry)) continue;
        take(entry);
        while (!ascent.done() && hits_[ascent.peek()] == hits_[entry]) {
            const EntryId tied = ascent.next();
            if (candidates.evictable(tied)) take(tied);
        }
    }
    return starved;
}

std::unique_ptr<Policy> make_lfu_decay(const PolicyOptions& options) {
    return std::make_unique<LfuDecay>(read_lfu_decay_options(options));
}

}  // namespace tierstore
