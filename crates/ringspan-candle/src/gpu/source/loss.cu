// Cross entropy of rows of logits over a vocabulary. This source follows `pack.cu`; X_TYPE is F32, and W_TYPE is the type of the
// gradient.
//
// A block computes one row and reads it once in each kernel. Sums have a fixed order, so the same inputs give the same bits.

struct Params {
    // Contiguous rows of `width` logits, and their gradient, which may be in the same memory.
    const void *logits;
    void *gradient;
    // The target of each row: a token, or NO_TARGET.
    const u32 *targets;
    // Three numbers a row: the greatest logit, the sum of exponentials relative to it, and the target's logit.
    float *sums;
    // The logits are those of the vocabulary's tokens from `first` on.
    i64 width, first;
    // Factor of the gradient.
    float scale;
    // Logits become softcap * tanh(logit / softcap), unless it is 0.
    float softcap;
};

static_assert(sizeof(Params) == PARAMS_BYTES, "the params as the host fills it");

#define NO_TARGET 0xFFFFFFFFu
#define WARPS (THREADS / 32)

// The greatest of some numbers, and the sum of their exponentials relative to it.
struct LogSumExp {
    float max, sum;
};

// Adds numbers to the sum. A NaN or +inf among them makes the sum NaN.
__device__ inline void accumulate(LogSumExp &partial, const float (&x)[AT_ONCE]) {
    float max = partial.max;
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
        max = x[n] > max ? x[n] : max;
    }
    if (max > partial.max) {
        partial.sum *= expf(partial.max - max);
        partial.max = max;
    }
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
        // If all numbers so far are -inf, x - max is NaN.
        partial.sum += x[n] == NEGATIVE_INFINITY ? 0.0f : expf(x[n] - max);
    }
}

// The sum of `partial` relative to a greater maximum.
__device__ inline float relative(const LogSumExp &partial, float max) {
    return partial.sum == 0.0f ? 0.0f : partial.sum * expf(partial.max - max);
}

// Merges two sums; the result has the same bits in either order.
__device__ inline LogSumExp merged(const LogSumExp &a, const LogSumExp &b) {
    const float max = a.max > b.max ? a.max : b.max;
    return {max, relative(a, max) + relative(b, max)};
}

__device__ inline float capped(float x, float cap) {
    return cap == 0.0f ? x : cap * tanhf(x / cap);
}

extern __shared__ float shared[];

extern "C" __global__ void __launch_bounds__(THREADS) loss_sums(const Params params) {
    const i64 row = blockIdx.x, from = row * params.width;
    LogSumExp partial = {NEGATIVE_INFINITY, 0.0f};
    float x[AT_ONCE];
#pragma unroll 4
    for (i64 column = threadIdx.x * AT_ONCE; column < params.width; column += THREADS * AT_ONCE) {
        read<X_TYPE>(x, params.logits, from + column);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            x[n] = capped(x[n], params.softcap);
        }
        accumulate(partial, x);
    }
    for (int distance = 16; distance > 0; distance /= 2) {
        const float max = __shfl_xor_sync(0xFFFFFFFFu, partial.max, distance);
        partial = merged(partial, {max, __shfl_xor_sync(0xFFFFFFFFu, partial.sum, distance)});
    }
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = partial.max;
        shared[WARPS + threadIdx.x / 32] = partial.sum;
    }
    __syncthreads();
    if (threadIdx.x > 0) {
        return;
    }
    for (int warp = 1; warp < WARPS; warp++) {
        partial = merged(partial, {shared[warp], shared[WARPS + warp]});
    }
    const i64 place = (i64)params.targets[row] - params.first;
    float *sums = params.sums + row * 3;
    sums[0] = partial.max;
    sums[1] = partial.sum;
    sums[2] = 0 <= place && place < params.width ? capped(element<X_TYPE>(params.logits, from + place), params.softcap) : 0.0f;
}

// The gradient is scale * (softmax - 1 at the target), with sums over the whole vocabulary, and 0 in rows without a target.
extern "C" __global__ void __launch_bounds__(THREADS) loss_gradient(const Params params) {
    const i64 row = blockIdx.x, from = row * params.width;
    const u32 target = params.targets[row];
    const i64 place = (i64)target - params.first;
    const float max = params.sums[row * 3], factor = params.scale / params.sums[row * 3 + 1];
    for (i64 column = threadIdx.x * AT_ONCE; column < params.width; column += THREADS * AT_ONCE) {
        float x[AT_ONCE];
        read<X_TYPE>(x, params.logits, from + column);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const float y = capped(x[n], params.softcap);
            const float slope = params.softcap == 0.0f ? 1.0f : 1.0f - (y / params.softcap) * (y / params.softcap);
            x[n] = (expf(y - max) * factor - (column + n == place ? params.scale : 0.0f)) * slope;
            x[n] = target == NO_TARGET ? 0.0f : x[n];
        }
        write<W_TYPE>(params.gradient, from + column, x);
    }
}
