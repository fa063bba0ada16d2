// Root-mean-square normalisation (Zhang and Sennrich, 2019). This source follows `pack.cu`.
//
// `lanes` threads share a row: a power of two up to a warp, with several rows a block, or all threads of the block. They read
// the row twice, once for its sums and once to write the result. Sums have a fixed order, so the same inputs give the same bits.
//
// The input may be a residual sum: a layer's input plus the layer's output.

struct Params {
    // Rows of x, of y, which is added to x, of the gradient of the result, and of a gradient of x to add, or null.
    const void *x, *y, *d, *other_gradient, *weight;
    // Rows of the sum of x and y, and of the result.
    void *sum, *out;
    // 1 / root mean square of each row.
    float *inverse;
    // Column sums of each chunk of rows, [chunks, width].
    float *sums;
    // Elements from one row of x, y and d to the next; number of rows in a chunk.
    i64 rows, width, x_stride, y_stride, d_stride, chunk;
    int lanes;
    float eps;
};

static_assert(sizeof(Params) == PARAMS_BYTES, "the params as the host fills it");

extern __shared__ float shared[];

// Sums over the threads of a row; each of them gets the sums.
template <int COUNT> __device__ void add_up(float (&sums)[COUNT], int lanes) {
    for (int distance = min(lanes, 32) / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            sums[n] += __shfl_xor_sync(0xFFFFFFFFu, sums[n], distance);
        }
    }
    if (lanes <= 32) {
        return;
    }
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            shared[threadIdx.x / 32 * COUNT + n] = sums[n];
        }
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        sums[n] = 0.0f;
        for (int warp = 0; warp < THREADS / 32; warp++) {
            sums[n] += shared[warp * COUNT + n];
        }
    }
}

__device__ inline i64 row_of(const Params &params) {
    return (i64)blockIdx.x * (THREADS / params.lanes) + threadIdx.x / params.lanes;
}

__device__ inline float inverse_root(const Params &params, float squares) {
    return 1.0f / sqrtf(squares / (float)params.width + params.eps);
}

// Writes x * inverse * weight, where x is the input or, if ADDS, its sum with y.
template <bool ADDS> __device__ void normed(const Params &params) {
    const i64 row = row_of(params), first = threadIdx.x % params.lanes * AT_ONCE, step = params.lanes * AT_ONCE;
    const i64 width = row < params.rows ? params.width : 0;
    float x[AT_ONCE], w[AT_ONCE], sums[1] = {0.0f};
    for (i64 column = first; column < width; column += step) {
        read<X_TYPE>(x, params.x, row * params.x_stride + column);
        if (ADDS) {
            read<X_TYPE>(w, params.y, row * params.y_stride + column);
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++) {
                x[n] += w[n];
            }
            // The norm is computed of the sum as it is stored.
            round_to<X_TYPE>(x);
            write<X_TYPE>(params.sum, row * params.width + column, x);
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            sums[0] += x[n] * x[n];
        }
    }
    add_up(sums, params.lanes);
    const float inverse = inverse_root(params, sums[0]);
    for (i64 column = first; column < width; column += step) {
        // A thread reads only elements of the sum that it wrote itself.
        read<X_TYPE>(x, ADDS ? params.sum : params.x, row * (ADDS ? params.width : params.x_stride) + column);
        read<W_TYPE>(w, params.weight, column);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            x[n] = x[n] * inverse * w[n];
        }
        write<X_TYPE>(params.out, row * params.width + column, x);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) rms_norm(const Params params) { normed<false>(params); }

extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_of_sum(const Params params) { normed<true>(params); }

// The gradient of x is inverse * weight * d - x * inverse^3 * mean(x * weight * d), plus `other_gradient`.
extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_backward(const Params params) {
    const i64 row = row_of(params), first = threadIdx.x % params.lanes * AT_ONCE, step = params.lanes * AT_ONCE;
    const i64 width = row < params.rows ? params.width : 0;
    float x[AT_ONCE], w[AT_ONCE], d[AT_ONCE], sums[2] = {0.0f, 0.0f};
    for (i64 column = first; column < width; column += step) {
        read<X_TYPE>(x, params.x, row * params.x_stride + column);
        read<X_TYPE>(d, params.d, row * params.d_stride + column);
        read<W_TYPE>(w, params.weight, column);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            sums[0] += x[n] * x[n];
            sums[1] += x[n] * w[n] * d[n];
        }
    }
    add_up(sums, params.lanes);
    const float inverse = inverse_root(params, sums[0]);
    const float along = sums[1] / (float)params.width * inverse * inverse * inverse;
    for (i64 column = first; column < width; column += step) {
        read<X_TYPE>(x, params.x, row * params.x_stride + column);
        read<X_TYPE>(d, params.d, row * params.d_stride + column);
        read<W_TYPE>(w, params.weight, column);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            d[n] = inverse * w[n] * d[n] - x[n] * along;
        }
        if (params.other_gradient) {
            read<X_TYPE>(x, params.other_gradient, row * params.width + column);
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++) {
                d[n] += x[n];
            }
        }
        write<X_TYPE>(params.out, row * params.width + column, d);
    }
    if (width > 0 && first == 0) {
        params.inverse[row] = inverse;
    }
}

// Sums columns over rows first .. end with all threads of the block: `lanes` threads share a row, the other threads take later
// rows. Returns true for the threads that hold the sums.
template <class Term> __device__ bool add_columns(float (&sums)[AT_ONCE], const Params &params, i64 first, i64 end, Term term) {
    const int below = threadIdx.x / params.lanes, rows = THREADS / params.lanes;
    const i64 column = ((i64)blockIdx.x * params.lanes + threadIdx.x % params.lanes) * AT_ONCE;
    const bool held = column < params.width;
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
        sums[n] = 0.0f;
    }
    for (i64 row = held ? first + below : end; row < end; row += rows) {
        term(sums, row, column);
    }
    // The layout [AT_ONCE, THREADS] lets neighbouring threads write neighbouring elements.
    for (int half = rows / 2; half > 0; half /= 2) {
        if (half <= below && below < 2 * half) {
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++) {
                shared[n * THREADS + threadIdx.x] = sums[n];
            }
        }
        __syncthreads();
        if (below < half) {
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++) {
                sums[n] += shared[n * THREADS + threadIdx.x + half * params.lanes];
            }
        }
    }
    return held && below == 0;
}

// The gradient of the weight from one chunk of rows: the sum of d * x * inverse.
extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_weight(const Params params) {
    const i64 first = blockIdx.y * params.chunk, end = min(first + params.chunk, params.rows);
    float sums[AT_ONCE];
    const auto term = [&](float(&sums)[AT_ONCE], i64 row, i64 column) {
        float x[AT_ONCE], d[AT_ONCE];
        read<X_TYPE>(x, params.x, row * params.x_stride + column);
        read<X_TYPE>(d, params.d, row * params.d_stride + column);
        const float inverse = params.inverse[row];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            sums[n] += d[n] * x[n] * inverse;
        }
    };
    if (add_columns(sums, params, first, end, term)) {
        write<F32>(params.sums, blockIdx.y * params.width + ((i64)blockIdx.x * params.lanes + threadIdx.x) * AT_ONCE, sums);
    }
}

// Sums the gradient of the weight over chunks; `rows` is their number.
extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_weight_sum(const Params params) {
    float sums[AT_ONCE];
    const auto term = [&](float(&sums)[AT_ONCE], i64 row, i64 column) {
        float part[AT_ONCE];
        read<F32>(part, params.sums, row * params.width + column);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            sums[n] += part[n];
        }
    };
    if (add_columns(sums, params, 0, params.rows, term)) {
        write<W_TYPE>(params.out, ((i64)blockIdx.x * params.lanes + threadIdx.x) * AT_ONCE, sums);
    }
}
