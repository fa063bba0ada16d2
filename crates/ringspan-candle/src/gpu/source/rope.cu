// Rotary position embedding (Su et al., 2021): rotates elements i and i + D/2 of every head by the token's angle i. This source
// follows `pack.cu`.

struct Job {
    // x is [tokens, heads, D] with strides; the result is contiguous.
    const void *x;
    void *out;
    // Cosines and sines of the angles, [tokens, D/2].
    const float *cos, *sin;
    i64 tokens, heads, half, token_stride, head_stride, stride;
    // 1, or -1 to rotate back in the backward pass.
    float sign;
};

static_assert(sizeof(Job) == JOB_BYTES, "the job as the host fills it");

extern "C" __global__ void __launch_bounds__(THREADS) rope(const Job job) {
    const i64 at = (i64)blockIdx.x * THREADS + threadIdx.x, pieces = job.half / AT_ONCE;
    const i64 row = at / pieces, token = row / job.heads, pair = (at - row * pieces) * AT_ONCE;
    if (token >= job.tokens) {
        return;
    }
    const i64 from = token * job.token_stride + (row - token * job.heads) * job.head_stride;
    const i64 to = row * 2 * job.half + pair;
    float a[AT_ONCE], b[AT_ONCE], cos[AT_ONCE], sin[AT_ONCE];
    read<X_TYPE>(a, job.x, from + pair * job.stride);
    read<X_TYPE>(b, job.x, from + (pair + job.half) * job.stride);
    read<F32>(cos, job.cos, token * job.half + pair);
    read<F32>(sin, job.sin, token * job.half + pair);
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
        const float x = a[n], y = b[n], s = job.sign * sin[n];
        a[n] = x * cos[n] - y * s;
        b[n] = y * cos[n] + x * s;
    }
    write<X_TYPE>(job.out, to, a);
    write<X_TYPE>(job.out, to + job.half, b);
}
