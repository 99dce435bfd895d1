// What every x86-64 has; the compiler may vectorise across the lanes.
#include <cstddef>
#include <cstdint>

namespace tierstore::quant_kernels {
namespace {

struct V {
    float lane[16];

    static V set(float x) {
        V v;
        for (float& l : v.lane) l = x;
        return v;
    }
    static V load(const float* p) {
        V v;
        __builtin_memcpy(v.lane, p, sizeof v.lane);
        return v;
    }
    static void store(float* p, V v) { __builtin_memcpy(p, v.lane, sizeof v.lane); }
    static V add(V a, V b) {
        for (int i = 0; i < 16; ++i) a.lane[i] += b.lane[i];
        return a;
    }
    static V mul(V a, V b) {
        for (int i = 0; i < 16; ++i) a.lane[i] *= b.lane[i];
        return a;
    }
    static V load_int8(const std::uint8_t* p) {
        V v;
        for (int i = 0; i < 16; ++i) v.lane[i] = static_cast<float>(static_cast<std::int8_t>(p[i]));
        return v;
    }
    static float sum(V v) {
        for (int n = 8; n > 0; n /= 2) {
            for (int i = 0; i < n; ++i) v.lane[i] += v.lane[i + n];
        }
        return v.lane[0];
    }

    // What the 16 codes of a block stand for.
    struct Table {
        float value[16];
        explicit Table(const float* p) {
            for (int i = 0; i < 16; ++i) {
                value[i] = static_cast<float>(i) * p[0];
                value[i] += p[1];
            }
        }
        V low(const std::uint8_t* p) const {
            V v;
            for (int i = 0; i < 16; ++i) v.lane[i] = value[p[i] & 15];
            return v;
        }
        V high(const std::uint8_t* p) const {
            V v;
            for (int i = 0; i < 16; ++i) v.lane[i] = value[p[i] >> 4];
            return v;
        }
    };
};

constexpr std::size_t tile_rows = 1, tile_outputs = 2;

}  // namespace
}  // namespace tierstore::quant_kernels

#include "native/quant/kernels.inl"

namespace tierstore::quant_kernels {
const Kernels scalar = all;
}
