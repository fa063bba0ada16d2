// Root-mean-square normalisation (Zhang and Sennrich, 2019). This source follows `pack.cu`.
//
// `lanes` threads share a row: a power of two up to a warp, with several rows a block, or all threads of the block. They read
// the row twice, once for its sums and once to write the result. Sums have a fixed order, so the same inputs give the same bits.
//
// The input may be a residual sum: a layer's input plus the layer's output.

struct Job {
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

static_assert(sizeof(Job) == JOB_BYTES, "the job as the host fills it");

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

__device__ inline i64 row_of(const Job &job) {
    return (i64)blockIdx.x * (THREADS / job.lanes) + threadIdx.x / job.lanes;
}

__device__ inline float inverse_root(const Job &job, float squares) {
    return 1.0f / sqrtf(squares / (float)job.width + job.eps);
}

// Writes x * inverse * weight, where x is the input or, if ADDS, its sum with y.
template <bool ADDS> __device__ void normed(const Job &job) {
    const i64 row = row_of(job), first = threadIdx.x % job.lanes * AT_ONCE, step = job.lanes * AT_ONCE;
    const i64 width = row < job.rows ? job.width : 0;
    float x[AT_ONCE], w[AT_ONCE], sums[1] = {0.0f};
    for (i64 column = first; column < width; column += step) {
        read<X_TYPE>(x, job.x, row * job.x_stride + column);
        if (ADDS) {
            read<X_TYPE>(w, job.y, row * job.y_stride + column);
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++) {
                x[n] += w[n];
            }
            // The norm is computed of the sum as it is stored.
            round_to<X_TYPE>(x);
            write<X_TYPE>(job.sum, row * job.width + column, x);
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            sums[0] += x[n] * x[n];
        }
    }
    add_up(sums, job.lanes);
    const float inverse = inverse_root(job, sums[0]);
    for (i64 column = first; column < width; column += step) {
        // A thread reads only elements of the sum that it wrote itself.
        read<X_TYPE>(x, ADDS ? job.sum : job.x, row * (ADDS ? job.width : job.x_stride) + column);
        read<W_TYPE>(w, job.weight, column);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            x[n] = x[n] * inverse * w[n];
        }
        write<X_TYPE>(job.out, row * job.width + column, x);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) rms_norm(const Job job) { normed<false>(job); }

extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_of_sum(const Job job) { normed<true>(job); }

// The gradient of x is inverse * weight * d - x * inverse^3 * mean(x * weight * d), plus `other_gradient`.
extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_backward(const Job job) {
    const i64 row = row_of(job), first = threadIdx.x % job.lanes * AT_ONCE, step = job.lanes * AT_ONCE;
    const i64 width = row < job.rows ? job.width : 0;
    float x[AT_ONCE], w[AT_ONCE], d[AT_ONCE], sums[2] = {0.0f, 0.0f};
    for (i64 column = first; column < width; column += step) {
        read<X_TYPE>(x, job.x, row * job.x_stride + column);
        read<X_TYPE>(d, job.d, row * job.d_stride + column);
        read<W_TYPE>(w, job.weight, column);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            sums[0] += x[n] * x[n];
            sums[1] += x[n] * w[n] * d[n];
        }
    }
    add_up(sums, job.lanes);
    const float inverse = inverse_root(job, sums[0]);
    const float along = sums[1] / (float)job.width * inverse * inverse * inverse;
    for (i64 column = first; column < width; column += step) {
        read<X_TYPE>(x, job.x, row * job.x_stride + column);
        read<X_TYPE>(d, job.d, row * job.d_stride + column);
        read<W_TYPE>(w, job.weight, column);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            d[n] = inverse * w[n] * d[n] - x[n] * along;
        }
        if (job.other_gradient) {
            read<X_TYPE>(x, job.other_gradient, row * job.width + column);
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++) {
                d[n] += x[n];
            }
        }
        write<X_TYPE>(job.out, row * job.width + column, d);
    }
    if (width > 0 && first == 0) {
        job.inverse[row] = inverse;
    }
}

// Sums columns over rows first .. end with all threads of the block: `lanes` threads share a row, the other threads take later
// rows. Returns true for the threads that hold the sums.
template <class Term> __device__ bool add_columns(float (&sums)[AT_ONCE], const Job &job, i64 first, i64 end, Term term) {
    const int below = threadIdx.x / job.lanes, rows = THREADS / job.lanes;
    const i64 column = ((i64)blockIdx.x * job.lanes + threadIdx.x % job.lanes) * AT_ONCE;
    const bool held = column < job.width;
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
                sums[n] += shared[n * THREADS + threadIdx.x + half * job.lanes];
            }
        }
    }
    return held && below == 0;
}

// The gradient of the weight from one chunk of rows: the sum of d * x * inverse.
extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_weight(const Job job) {
    const i64 first = blockIdx.y * job.chunk, end = min(first + job.chunk, job.rows);
    float sums[AT_ONCE];
    const auto term = [&](float(&sums)[AT_ONCE], i64 row, i64 column) {
        float x[AT_ONCE], d[AT_ONCE];
        read<X_TYPE>(x, job.x, row * job.x_stride + column);
        read<X_TYPE>(d, job.d, row * job.d_stride + column);
        const float inverse = job.inverse[row];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            sums[n] += d[n] * x[n] * inverse;
        }
    };
    if (add_columns(sums, job, first, end, term)) {
        write<F32>(job.sums, blockIdx.y * job.width + ((i64)blockIdx.x * job.lanes + threadIdx.x) * AT_ONCE, sums);
    }
}

// Sums the gradient of the weight over chunks; `rows` is their number.
extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_weight_sum(const Job job) {
    float sums[AT_ONCE];
    const auto term = [&](float(&sums)[AT_ONCE], i64 row, i64 column) {
        float part[AT_ONCE];
        read<F32>(part, job.sums, row * job.width + column);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            sums[n] += part[n];
        }
    };
    if (add_columns(sums, job, 0, job.rows, term)) {
        write<W_TYPE>(job.out, ((i64)blockIdx.x * job.lanes + threadIdx.x) * AT_ONCE, sums);
    }
}
