// The gated activation of a feed-forward layer, act(gate) * up (Shazeer, 2020). This source follows `pack.cu`; GELU is 1 for the
// tanh form of GELU and 0 for SiLU.

struct Params {
    // Rows of `width` elements, with a stride each; results are contiguous.
    const void *gate, *up, *d;
    void *out, *d_gate, *d_up;
    i64 count, width, gate_stride, up_stride, d_stride;
};

static_assert(sizeof(Params) == PARAMS_BYTES, "the params as the host fills it");

// Returns x / (1 + e^-u) and its derivative. For GELU, u is sqrt(8 / pi) (x + 0.044715 x^3), for SiLU x.
__device__ inline float activated(float x, float &slope) {
#if GELU
    const float root = 1.5957691216057308f, cube = 0.044715f * x * x;
    const float u = root * x * (1.0f + cube), du = root * (1.0f + 3.0f * cube);
#else
    const float u = x, du = 1.0f;
#endif
    const float share = 1.0f / (1.0f + expf(-u));
    slope = share * (1.0f + x * (1.0f - share) * du);
    return x * share;
}

// The number of the thread's first element.
__device__ inline i64 first_element() { return ((i64)blockIdx.x * THREADS + threadIdx.x) * AT_ONCE; }

// The position of element `at` in a tensor with this row stride.
__device__ inline i64 strided(const Params &params, i64 at, i64 stride) {
    return stride == params.width ? at : at / params.width * stride + at % params.width;
}

extern "C" __global__ void __launch_bounds__(THREADS) gate(const Params params) {
    const i64 at = first_element();
    if (at >= params.count) {
        return;
    }
    float gate[AT_ONCE], up[AT_ONCE];
    read<X_TYPE>(gate, params.gate, strided(params, at, params.gate_stride));
    read<X_TYPE>(up, params.up, strided(params, at, params.up_stride));
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
        float slope;
        gate[n] = activated(gate[n], slope) * up[n];
    }
    write<X_TYPE>(params.out, at, gate);
}

extern "C" __global__ void __launch_bounds__(THREADS) gate_backward(const Params params) {
    const i64 at = first_element();
    if (at >= params.count) {
        return;
    }
    float gate[AT_ONCE], up[AT_ONCE], d[AT_ONCE];
    read<X_TYPE>(gate, params.gate, strided(params, at, params.gate_stride));
    read<X_TYPE>(up, params.up, strided(params, at, params.up_stride));
    read<X_TYPE>(d, params.d, strided(params, at, params.d_stride));
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
        float slope;
        const float open = activated(gate[n], slope);
        gate[n] = d[n] * up[n] * slope;
        up[n] = d[n] * open;
    }
    write<X_TYPE>(params.d_gate, at, gate);
    write<X_TYPE>(params.d_up, at, up);
}
