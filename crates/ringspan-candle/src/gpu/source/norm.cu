// Root-mean-square normalisation (Zhang and Sennrich, 2019). Behind `pack.cu`.
//
// `lanes` threads have a row: a power of two up to a warp, with several rows a block, or all threads of the block. They go
// over it twice, once for its sums and once to write. Sums have one order, so the same inputs give the same bits.
//
// What is normed may be a sum itself, of a layer's input and what the layer makes of it.

struct Job {
    // Rows of x, of y, which is added to it, of the gradient of the result, and of that of x from elsewhere, or null.
    const void *x, *y, *d, *beside, *weight;
    // Rows of the sum of x and y, and of the result.
    void *sum, *out;
    // 1 / root mean square of each row.
    float *inverse;
    // Of each chunk of rows the sums of its columns [chunks, width].
    float *sums;
    // Rows of x, y and d lie so many elements apart; a chunk has `chunk` of them.
    i64 rows, width, x_stride, y_stride, d_stride, chunk;
    int lanes;
    float eps;
};

static_assert(sizeof(Job) == JOB_BYTES, "the job as the host fills it");

extern __shared__ float shared[];

// Sums over the threads of a row, for each of them.
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

// x * inverse * weight, of x or of its sum with y.
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
            // Its norm is that of the sum as others read it.
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
        // The thread wrote what it reads of a sum.
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

// The gradient of x: inverse * weight * d - x * inverse^3 * mean(x * weight * d), and what it has from elsewhere.
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
        if (job.beside) {
            read<X_TYPE>(x, job.beside, row * job.width + column);
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

// Sums of columns over rows first .. end, by all threads of the block: `lanes` of them side by side in a row, the others below.
// True for who has the sums.
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
    // By number, then by thread: neighbours write to neighbours.
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

// Of a chunk of rows the gradient of the weight: the sum of d * x * inverse.
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

// The sum over chunks, of which there are `rows`.
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
