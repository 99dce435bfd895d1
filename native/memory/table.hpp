// A fixed array of numbers that operations read and write while Python reads it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tierstore {

// Elements are loaded and stored atomically (relaxed): wait for a ticket to get an order.
template <class T>
class Table {
public:
    explicit Table(size_t n) : values_(n, T{}) {}

    size_t size() const { return values_.size(); }
    T* data() { return values_.data(); }
    T load(size_t i) { return std::atomic_ref<T>(values_[i]).load(std::memory_order_relaxed); }
    void store(size_t i, T value) { std::atomic_ref<T>(values_[i]).store(value, std::memory_order_relaxed); }

private:
    std::vector<T> values_;
};

using CrcTable = Table<uint32_t>;
using DoubleTable = Table<double>;

}  // namespace tierstore
