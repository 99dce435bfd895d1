#include "native/cache/event_buffer.hpp"

#include <utility>

namespace tierstore {

void EventBuffer::before_event() {
    if (columns_.kinds.size() >= rows_ || columns_.records.size() >= rows_) flush();
}

void EventBuffer::on_event(const Event& event) {
    EventColumns& to = columns_;
    const auto kind = static_cast<std::uint8_t>(event.kind);
    if (event.added != nullptr) {
        records_.push_back(*event.added);
        if (!begun_) return;
        ++late_records_;
    }
    begun_ = true;
    const bool joins = event.kind == EventKind::ADD && !to.kinds.empty() && to.kinds.back() == kind &&
                       to.at.back() == event.at && to.steps.back() == event.step;
    if (!joins) {
        to.kinds.push_back(kind);
        to.phases.push_back(static_cast<std::uint8_t>(event.phase));
        to.layers.push_back(event.layer);
        to.at.push_back(event.at);
        to.steps.push_back(event.step);
        to.offsets.push_back(to.offsets.back());
    }
    to.offsets.back() += event.records.size();
    to.records.insert(to.records.end(), event.records.begin(), event.records.end());
    to.flags.insert(to.flags.end(), event.flags.begin(), event.flags.end());
    to.flags.resize(to.records.size(), 0);
}

void EventBuffer::flush() {
    if (!columns_.kinds.empty()) sink_(std::exchange(columns_, {}));
}

}  // namespace tierstore
