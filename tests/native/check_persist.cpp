// persist_bytes against memcpy at every alignment, and nothing around it touched.
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <vector>

#include "check.hpp"
#include "native/memory/persist.hpp"

int main() {
    constexpr size_t kRoom = 8192;
    std::vector<std::byte> from(kRoom), to(kRoom), want(kRoom);
    for (size_t i = 0; i < kRoom; ++i) from[i] = std::byte(i * 31 + i / 251);
    unsigned cases = 0;
    for (size_t at = 0; at < 130; at += 1 + at / 70) {
        for (size_t shift : {size_t{0}, size_t{1}, size_t{17}, size_t{64}}) {
            for (size_t n : {0, 1, 2, 63, 64, 65, 127, 128, 129, 255, 1000, 4096, 4099}) {
                std::memset(to.data(), 0x5a, kRoom);
                std::memset(want.data(), 0x5a, kRoom);
                std::memcpy(want.data() + at, from.data() + shift, n);
                tierstore::persist_bytes(to.data() + at, from.data() + shift, n);
                CHECK(to == want);
                ++cases;
            }
        }
    }
    std::printf("%u passed, 0 failed\n", cases);
}
