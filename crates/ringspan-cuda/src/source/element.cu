// Reads and writes of single elements in each type; arithmetic is in f32.

#define F32 0
#define BF16 1
#define F16 2

#define LOG2_E 1.4426950408889634f
#define NEGATIVE_INFINITY (-__int_as_float(0x7F800000))

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

template <int TYPE> __device__ float element(const void *data, i64 at) {
    if (TYPE == F32) {
        return ((const float *)data)[at];
    }
    const u32 bits = ((const unsigned short *)data)[at];
    if (TYPE == BF16) {
        return __int_as_float((int)(bits << 16));
    }
    const u32 sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, fraction = bits & 1023u;
    if (exponent == 0) {
        // Below 2^-14: a multiple of 2^-24.
        const float small = (float)fraction * 5.9604644775390625e-8f;
        return sign ? -small : small;
    }
    const u32 wide = exponent == 31 ? 255u : exponent + 112u;
    return __int_as_float((int)(sign | wide << 23 | fraction << 13));
}

// Writes x, rounded to the nearest, ties to even; a NaN stays NaN.
template <int TYPE> __device__ void store(void *data, i64 at, float x) {
    if (TYPE == F32) {
        ((float *)data)[at] = x;
        return;
    }
    const u32 bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    u32 to;
    if (TYPE == BF16) {
        const u32 rounded = bits + 0x7FFFu + (bits >> 16 & 1u);
        to = magnitude > 0x7F800000u ? bits >> 16 | 0x40u : rounded >> 16;
    } else if (magnitude > 0x7F800000u) {
        to = sign | 0x7E00u | (magnitude >> 13 & 0x3FFu);
    } else if (magnitude >= 0x47800000u) {
        to = sign | 0x7C00u; // Numbers from 2^16 on become infinite.
    } else if (magnitude >= 0x38800000u) {
        // A carry of the rounding goes into the exponent, and turns the greatest number into infinity.
        to = sign | (magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
    } else if (magnitude >= 0x33000000u) {
        // Below 2^-14: a multiple of 2^-24.
        const u32 shift = 126u - (magnitude >> 23), fraction = (magnitude & 0x7FFFFFu) | 0x800000u;
        const u32 whole = fraction >> shift, rest = fraction & ((1u << shift) - 1u), half = 1u << (shift - 1u);
        to = sign | (whole + (rest > half || (rest == half && (whole & 1u))));
    } else {
        to = sign;
    }
    ((unsigned short *)data)[at] = (unsigned short)to;
}
