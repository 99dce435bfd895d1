// The floating-point mode that kernels compute in, whatever the caller's is.
#pragma once

#include <xmmintrin.h>

namespace tierstore {

// Sets the thread's SSE control word within a scope: exceptions masked, round to nearest.
class FloatMode {
public:
    enum class Subnormals { Keep, Flush };

    explicit FloatMode(Subnormals subnormals) : saved_(_mm_getcsr()) {
        constexpr unsigned defaults = 0x1f80, flush_to_zero = 0x8000, denormals_are_zero = 0x0040;
        constexpr unsigned flush = defaults | flush_to_zero | denormals_are_zero;
        _mm_setcsr(subnormals == Subnormals::Flush ? flush : defaults);
    }
    ~FloatMode() { _mm_setcsr(saved_); }
    FloatMode(const FloatMode&) = delete;
    FloatMode& operator=(const FloatMode&) = delete;

private:
    unsigned saved_;
};

}  // namespace tierstore
