// The observer that traces are recorded with: events as columns, which a sink takes many at a time.
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
    // The sink is called with at least `rows` events or units, before the call that follows.
    EventBuffer(std::size_t rows, Sink sink) : rows_(rows), sink_(std::move(sink)) {}

    void before_event() override;
    void on_event(const Event& event) override;
    // Gives the sink what is buffered.
    void flush();

    // Of all records, in order; the last `late_records` were added after the first other event. Only those
    // have ADD events, neighbours in one.
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
