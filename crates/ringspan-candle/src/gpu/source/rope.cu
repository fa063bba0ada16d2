// Rotary position embedding (Su et al., 2021): rotates elements i and i + D/2 of every head by the token's angle i. This source
// follows `pack.cu`.

struct Params {
    // x is [tokens, heads, D] with strides; the result is contiguous.
    const void *x;
    void *out;
    // Cosines and sines of the angles, [tokens, D/2].
    const float *cos, *sin;
    i64 tokens, heads, half, token_stride, head_stride, stride;
    // 1, or -1 to rotate back in the backward pass.
    float sign;
};

static_assert(sizeof(Params) == PARAMS_BYTES, "the params as the host fills it");

extern "C" __global__ void __launch_bounds__(THREADS) rope(const Params params) {
    const i64 at = (i64)blockIdx.x * THREADS + threadIdx.x, pieces = params.half / AT_ONCE;
    const i64 row = at / pieces, token = row / params.heads, pair = (at - row * pieces) * AT_ONCE;
    if (token >= params.tokens) {
        return;
    }
    const i64 from = token * params.token_stride + (row - token * params.heads) * params.head_stride;
    const i64 to = row * 2 * params.half + pair;
    float a[AT_ONCE], b[AT_ONCE], cos[AT_ONCE], sin[AT_ONCE];
    read<X_TYPE>(a, params.x, from + pair * params.stride);
    read<X_TYPE>(b, params.x, from + (pair + params.half) * params.stride);
    read<F32>(cos, params.cos, token * params.half + pair);
    read<F32>(sin, params.sin, token * params.half + pair);
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
        const float x = a[n], y = b[n], s = params.sign * sin[n];
        a[n] = x * cos[n] - y * s;
        b[n] = y * cos[n] + x * s;
    }
    write<X_TYPE>(params.out, to, a);
    write<X_TYPE>(params.out, to + params.half, b);
}
