// Keys by number and numbers by key: about 30 bytes per key of 20 bytes, where a Python dictionary takes 150.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace tierstore {

// Keys are numbered from 0 in order of arrival. Open addressing: a place holds a key's number, or kNone.
class KeyTable {
public:
    static constexpr std::uint32_t kNone = ~std::uint32_t{0};

    std::uint32_t size() const { return static_cast<std::uint32_t>(ends_.size()); }

    std::string_view key(std::uint32_t number) const {
        if (number >= size()) throw std::out_of_range("no key " + std::to_string(number));
        const std::size_t begin = number == 0 ? 0 : ends_[number - 1];
        return std::string_view(text_).substr(begin, ends_[number] - begin);
    }

    // The key's number, or kNone.
    std::uint32_t find(std::string_view key) const {
        return places_.empty() ? kNone : places_[place_of(key)];
    }

    // Adds a key and returns its number. Throws std::invalid_argument if it exists already.
    std::uint32_t add(std::string_view key) {
        if (4 * (ends_.size() + 1) > 3 * places_.size()) rehash();
        const std::size_t place = place_of(key);
        if (places_[place] != kNone) throw std::invalid_argument("the key is there already");
        const std::uint32_t number = size();
        text_.append(key);
        ends_.push_back(text_.size());
        places_[place] = number;
        return number;
    }

    // Removes the key that was added last.
    void pop() {
        const std::string_view last = key(size() - 1);
        std::size_t hole = place_of(last);
        text_.resize(text_.size() - last.size());
        ends_.pop_back();
        // Entries displaced past the hole move up.
        const std::size_t mask = places_.size() - 1;
        for (std::size_t at = (hole + 1) & mask; places_[at] != kNone; at = (at + 1) & mask) {
            const std::size_t home = std::hash<std::string_view>()(key(places_[at])) & mask;
            if (((at - home) & mask) >= ((at - hole) & mask)) {
                places_[hole] = places_[at];
                hole = at;
            }
        }
        places_[hole] = kNone;
    }

    // All numbers, in the order of their keys (bytewise, which for UTF-8 is that of code points).
    std::vector<std::uint32_t> sorted() const {
        std::vector<std::uint32_t> numbers(size());
        std::iota(numbers.begin(), numbers.end(), 0u);
        const auto before = [this](std::uint32_t a, std::uint32_t b) { return key(a) < key(b); };
        if (!std::is_sorted(numbers.begin(), numbers.end(), before)) {
            std::sort(numbers.begin(), numbers.end(), before);
        }
        return numbers;
    }

private:
    std::size_t place_of(std::string_view wanted) const {
        const std::size_t mask = places_.size() - 1;
        std::size_t place = std::hash<std::string_view>()(wanted) & mask;
        while (places_[place] != kNone && key(places_[place]) != wanted) place = (place + 1) & mask;
        return place;
    }

    void rehash() {
        places_.assign(std::max<std::size_t>(2 * places_.size(), 16), kNone);
        for (std::uint32_t number = 0; number < size(); ++number) places_[place_of(key(number))] = number;
    }

    std::string text_;
    std::vector<std::size_t> ends_;
    std::vector<std::uint32_t> places_;
};

}  // namespace tierstore
