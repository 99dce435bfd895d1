// The observer that records traces: buffers events as columns and passes many at a time to a sink.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "native/cache/observer.hpp"

namespace tierstore {

// Event i has the units [offsets[i], offsets[i + 1]) of `records` and `flags`.
struct EventColumns {
    std::vector<std::uint8_t> kinds;
    std::vector<std::uint8_t> phases;
    std::vector<std::uint32_t> layers;
    std::vector<std::uint32_t> at;
    std::vector<std::uint32_t> steps;
    std::vector<std::uint64_t> offsets{0};
    std::vector<std::uint32_t> records;
    std::vector<std::uint16_t> flags;
};

class EventBuffer final : public ResidencyObserver {
public:
    using Sink = std::function<void(EventColumns&&)>;
    // The sink is called with at least `rows` events or units, before the event that follows.
    EventBuffer(std::size_t rows, Sink sink) : rows_(rows), sink_(std::move(sink)) {}

    void before_event() override;
    void on_event(const Event& event) override;
    // Passes buffered events to the sink.
    void flush();

    // All records, in order; the last `late_records` were added after the first other event. Only those have ADD
    // events, one for each run of neighbours.
    const std::vector<RecordInfo>& records() const { return records_; }
    std::size_t late_records() const { return late_records_; }

private:
    std::size_t rows_;
    Sink sink_;
    EventColumns columns_;
    std::vector<RecordInfo> records_;
    std::size_t late_records_ = 0;
    bool begun_ = false;
};

}  // namespace tierstore
