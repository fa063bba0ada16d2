// bfloat16.
#pragma once
#include "narrow.h"

struct BrainFloat {
    static float widen(uint16_t bits) {
        const uint32_t wide = uint32_t(bits) << 16;
        float x;
        std::memcpy(&x, &wide, 4);
        return x;
    }

    // To the nearest, ties to even.
    static uint16_t narrow(float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        if (std::isnan(x)) {
            return uint16_t(bits >> 16 | 0x40);
        }
        return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
};

using __nv_bfloat16 = Narrow<BrainFloat>;
using __nv_bfloat162 = Pair<BrainFloat>;

inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
