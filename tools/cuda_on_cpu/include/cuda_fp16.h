// IEEE's binary16.
#pragma once
#include "narrow.h"

struct HalfFloat {
    static float widen(uint16_t bits) {
        const int exponent = bits >> 10 & 31, fraction = bits & 1023;
        float x = exponent == 0    ? std::ldexp(float(fraction), -24)
                  : exponent == 31 ? (fraction == 0 ? INFINITY : NAN)
                                   : std::ldexp(float(fraction + 1024), exponent - 25);
        return bits & 0x8000 ? -x : x;
    }

    // To the nearest, ties to even.
    static uint16_t narrow(float x) {
        const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
        const float size = std::fabs(x);
        if (std::isnan(x)) {
            return sign | 0x7e00;
        }
        if (size >= 65520.0f) {
            return sign | 0x7c00;
        }
        if (size < std::ldexp(1.0f, -14)) {
            return sign | uint16_t(std::nearbyint(std::ldexp(size, 24)));
        }
        int exponent;
        // In [1024, 2048]; 2048 is the next power of two, and the addition below carries into the exponent.
        const float fraction = std::nearbyint(std::ldexp(std::frexp(size, &exponent), 11));
        return sign | uint16_t(((exponent + 14) << 10) + int(fraction) - 1024);
    }
};

using __half = Narrow<HalfFloat>;
using half = __half;
using __half2 = Pair<HalfFloat>;

inline float __half2float(__half x) { return x; }
inline __half __float2half(float x) { return x; }
inline uint16_t __half_as_ushort(__half x) { return x.bits; }

inline __half __ushort_as_half(uint16_t bits) {
    __half x;
    x.bits = bits;
    return x;
}
