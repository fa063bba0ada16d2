// Operations on tensors besides attention: messages, sums, softmax states. This source follows `element.cu`.
//
// `pack` reads Q_TYPE and writes OUT_TYPE; the other kernels compute with f32.

struct Job {
    const void *from;
    void *to;
    // Rows on the side that is not contiguous; if null, they are the `count` rows from `first` on.
    const int *rows;
    const float *sinks;
    i64 first, count, width;
    // On that side: elements of a head, from one row to the next, and from one head to the next.
    i64 dim, row_stride, head_stride;
    // The sizes of a softmax state.
    i64 tokens, heads;
    float value;
};

static_assert(sizeof(Job) == JOB_BYTES, "the job as the host fills it");

__device__ inline i64 thread() { return (i64)blockIdx.x * THREADS + threadIdx.x; }

__device__ inline i64 row_at(const Job &job, i64 row) { return job.rows ? job.rows[row] : job.first + row; }

// Packs rows of a tensor: to[row, width].
extern "C" __global__ void __launch_bounds__(THREADS) pack(const Job job) {
    const i64 at = thread();
    if (at >= job.count * job.width) {
        return;
    }
    const i64 column = at % job.width;
    const i64 head = column / job.dim * job.head_stride;
    const i64 from = row_at(job, at / job.width) * job.row_stride + head + column % job.dim;
    if (Q_TYPE == OUT_TYPE && Q_TYPE != F32) {
        ((unsigned short *)job.to)[at] = ((const unsigned short *)job.from)[from];
    } else {
        store<OUT_TYPE>(job.to, at, element<Q_TYPE>(job.from, from));
    }
}

// Adds from[row, width] to rows of a sum.
extern "C" __global__ void __launch_bounds__(THREADS) add(const Job job) {
    const i64 at = thread();
    if (at < job.count * job.width) {
        const i64 row = row_at(job, at / job.width);
        ((float *)job.to)[row * job.row_stride + at % job.width] += ((const float *)job.from)[at];
    }
}

// Transposes from[count, width] to to[width, count].
extern "C" __global__ void __launch_bounds__(THREADS) transpose(const Job job) {
    const i64 at = thread();
    if (at < job.count * job.width) {
        ((float *)job.to)[at] = ((const float *)job.from)[at % job.count * job.width + at / job.count];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) fill(const Job job) {
    const i64 at = thread();
    if (at < job.count) {
        ((float *)job.to)[at] = job.value;
    }
}

// A softmax state is out [tokens, heads, width], then max and sum [heads, tokens]. LANES threads share a row.
#define LANES 32

struct SoftmaxState {
    float *out, *max, *sum;
};

__device__ inline SoftmaxState state(const void *data, const Job &job, i64 row) {
    const i64 rows = job.heads * job.tokens, head = row / job.tokens, token = row % job.tokens;
    float *const all = (float *)data;
    return {all + (token * job.heads + head) * job.width, all + rows * job.width + row, all + rows * (job.width + 1) + row};
}

// The lowest number is finite, so that subtracting it from -inf gives no NaN.
__device__ inline float finite(float x) { return fmaxf(x, -3.402823466e38f); }

// Adds the state `from` of the same queries over other keys to the state `to`.
extern "C" __global__ void __launch_bounds__(THREADS) merge(const Job job) {
    const i64 row = thread() / LANES, lane = threadIdx.x % LANES;
    const bool in_range = row < job.heads * job.tokens;
    SoftmaxState to = {}, from = {};
    float greatest = 0.0f, sum = 0.0f, before = 0.0f, more = 0.0f;
    if (in_range) {
        to = state(job.to, job, row);
        from = state(job.from, job, row);
        greatest = fmaxf(*to.max, *from.max);
        before = expf(*to.max - finite(greatest));
        more = expf(*from.max - finite(greatest));
        sum = *to.sum * before + *from.sum * more;
    }
    __syncthreads(); // One thread overwrites what all threads have read.
    if (in_range) {
        for (i64 column = lane; column < job.width; column += LANES) {
            to.out[column] = to.out[column] * before + from.out[column] * more;
        }
        if (lane == 0) {
            *to.max = greatest;
            *to.sum = sum;
        }
    }
}

// Turns the state `to` into output, maximum and sum, including sinks.
extern "C" __global__ void __launch_bounds__(THREADS) finish(const Job job) {
    const i64 row = thread() / LANES, lane = threadIdx.x % LANES;
    const bool in_range = row < job.heads * job.tokens;
    SoftmaxState to = {};
    float greatest = 0.0f, sum = 0.0f, before = 1.0f;
    if (in_range) {
        to = state(job.to, job, row);
        greatest = *to.max;
        sum = *to.sum;
        if (job.sinks) {
            const float sink = job.sinks[row / job.tokens];
            greatest = fmaxf(greatest, sink);
            before = expf(*to.max - finite(greatest));
            sum = sum * before + expf(sink - finite(greatest));
        }
    }
    __syncthreads(); // One thread overwrites what all threads have read.
    if (in_range) {
        const float factor = sum > 0.0f ? 1.0f / sum : 1.0f;
        for (i64 column = lane; column < job.width; column += LANES) {
            to.out[column] = to.out[column] * before * factor;
        }
        if (lane == 0) {
            *to.max = greatest;
            *to.sum = sum;
        }
    }
}
