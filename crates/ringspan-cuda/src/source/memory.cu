// Operations on tensors besides attention: messages, sums, softmax states. This source follows `element.cu`.
//
// `pack` reads Q_TYPE and writes OUT_TYPE; the other kernels compute with f32.

struct Params {
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

static_assert(sizeof(Params) == PARAMS_BYTES, "the params as the host fills it");

__device__ inline i64 thread() { return (i64)blockIdx.x * THREADS + threadIdx.x; }

__device__ inline i64 row_at(const Params &params, i64 row) { return params.rows ? params.rows[row] : params.first + row; }

// Packs rows of a tensor: to[row, width].
extern "C" __global__ void __launch_bounds__(THREADS) pack(const Params params) {
    const i64 at = thread();
    if (at >= params.count * params.width) {
        return;
    }
    const i64 column = at % params.width;
    const i64 head = column / params.dim * params.head_stride;
    const i64 from = row_at(params, at / params.width) * params.row_stride + head + column % params.dim;
    if (Q_TYPE == OUT_TYPE && Q_TYPE != F32) {
        ((unsigned short *)params.to)[at] = ((const unsigned short *)params.from)[from];
    } else {
        store<OUT_TYPE>(params.to, at, element<Q_TYPE>(params.from, from));
    }
}

// Adds from[row, width] to rows of a sum.
extern "C" __global__ void __launch_bounds__(THREADS) add(const Params params) {
    const i64 at = thread();
    if (at < params.count * params.width) {
        const i64 row = row_at(params, at / params.width);
        ((float *)params.to)[row * params.row_stride + at % params.width] += ((const float *)params.from)[at];
    }
}

// Transposes from[count, width] to to[width, count].
extern "C" __global__ void __launch_bounds__(THREADS) transpose(const Params params) {
    const i64 at = thread();
    if (at < params.count * params.width) {
        ((float *)params.to)[at] = ((const float *)params.from)[at % params.count * params.width + at / params.count];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) fill(const Params params) {
    const i64 at = thread();
    if (at < params.count) {
        ((float *)params.to)[at] = params.value;
    }
}

// A softmax state is out [tokens, heads, width], then max and sum [heads, tokens]. LANES threads share a row.
#define LANES 32

struct SoftmaxState {
    float *out, *max, *sum;
};

__device__ inline SoftmaxState state(const void *data, const Params &params, i64 row) {
    const i64 rows = params.heads * params.tokens, head = row / params.tokens, token = row % params.tokens;
    float *const all = (float *)data;
    return {all + (token * params.heads + head) * params.width, all + rows * params.width + row, all + rows * (params.width + 1) + row};
}

// The lowest number is finite, so that subtracting it from -inf gives no NaN.
__device__ inline float finite(float x) { return fmaxf(x, -3.402823466e38f); }

// Adds the state `from` of the same queries over other keys to the state `to`.
extern "C" __global__ void __launch_bounds__(THREADS) merge(const Params params) {
    const i64 row = thread() / LANES, lane = threadIdx.x % LANES;
    const bool in_range = row < params.heads * params.tokens;
    SoftmaxState to = {}, from = {};
    float greatest = 0.0f, sum = 0.0f, before = 0.0f, more = 0.0f;
    if (in_range) {
        to = state(params.to, params, row);
        from = state(params.from, params, row);
        greatest = fmaxf(*to.max, *from.max);
        before = expf(*to.max - finite(greatest));
        more = expf(*from.max - finite(greatest));
        sum = *to.sum * before + *from.sum * more;
    }
    __syncthreads(); // One thread overwrites what all threads have read.
    if (in_range) {
        for (i64 column = lane; column < params.width; column += LANES) {
            to.out[column] = to.out[column] * before + from.out[column] * more;
        }
        if (lane == 0) {
            *to.max = greatest;
            *to.sum = sum;
        }
    }
}

// Turns the state `to` into output, maximum and sum, including sinks.
extern "C" __global__ void __launch_bounds__(THREADS) finish(const Params params) {
    const i64 row = thread() / LANES, lane = threadIdx.x % LANES;
    const bool in_range = row < params.heads * params.tokens;
    SoftmaxState to = {};
    float greatest = 0.0f, sum = 0.0f, before = 1.0f;
    if (in_range) {
        to = state(params.to, params, row);
        greatest = *to.max;
        sum = *to.sum;
        if (params.sinks) {
            const float sink = params.sinks[row / params.tokens];
            greatest = fmaxf(greatest, sink);
            before = expf(*to.max - finite(greatest));
            sum = sum * before + expf(sink - finite(greatest));
        }
    }
    __syncthreads(); // One thread overwrites what all threads have read.
    if (in_range) {
        const float factor = sum > 0.0f ? 1.0f / sum : 1.0f;
        for (i64 column = lane; column < params.width; column += LANES) {
            to.out[column] = to.out[column] * before * factor;
        }
        if (lane == 0) {
            *to.max = greatest;
            *to.sum = sum;
        }
    }
}
