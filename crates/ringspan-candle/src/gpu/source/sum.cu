// Elementwise sum. This source follows `pack.cu`; X_TYPE is the type of x and of the sum, W_TYPE the type of y.

struct Params {
    // Contiguous elements.
    const void *x, *y;
    void *out;
    i64 count;
};

static_assert(sizeof(Params) == PARAMS_BYTES, "the params as the host fills it");

extern "C" __global__ void __launch_bounds__(THREADS) sum(const Params params) {
    const i64 at = ((i64)blockIdx.x * THREADS + threadIdx.x) * AT_ONCE;
    if (at >= params.count) {
        return;
    }
    float x[AT_ONCE], y[AT_ONCE];
    read<X_TYPE>(x, params.x, at);
    read<W_TYPE>(y, params.y, at);
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
        x[n] += y[n];
    }
    write<X_TYPE>(params.out, at, x);
}
