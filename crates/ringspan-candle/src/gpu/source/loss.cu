// Cross entropy over a vocabulary, of rows of logits. Behind `pack.cu`; X_TYPE is F32, and W_TYPE what the gradient is stored in.
//
// A block has a row, and goes over it once for each kernel. Sums have one order, so the same inputs give the same bits.

struct Job {
    // Rows of `width` logits that follow each other, and their gradient, perhaps in the same place.
    const void *logits;
    void *gradient;
    // Of each row its target: a token, or NO_TARGET.
    const u32 *targets;
    // Of each row what is known of it: the greatest logit, the sum of exponentials relative to it, and the target's logit.
    float *sums;
    // The first token is number `first` of the vocabulary.
    i64 width, first;
    // What the gradient is multiplied with.
    float scale;
    // Logits become softcap * tanh(logit / softcap), unless it is 0.
    float softcap;
};

static_assert(sizeof(Job) == JOB_BYTES, "the job as the host fills it");

#define NO_TARGET 0xFFFFFFFFu
#define WARPS (THREADS / 32)

// The greatest of some numbers, and the sum of their exponentials relative to it.
struct LogSumExp {
    float max, sum;
};

// Takes in more numbers. One that is none, or infinite, leaves a sum that is none.
__device__ inline void take(LogSumExp &partial, const float (&x)[AT_ONCE]) {
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
        // Where nothing greater was seen yet, there is no distance to it.
        partial.sum += x[n] == NEGATIVE_INFINITY ? 0.0f : expf(x[n] - max);
    }
}

__device__ inline float relative(const LogSumExp &partial, float max) {
    return partial.sum == 0.0f ? 0.0f : partial.sum * expf(partial.max - max);
}

// The same whichever of the two is the first.
__device__ inline LogSumExp both(const LogSumExp &a, const LogSumExp &b) {
    const float max = a.max > b.max ? a.max : b.max;
    return {max, relative(a, max) + relative(b, max)};
}

__device__ inline float capped(float x, float cap) {
    return cap == 0.0f ? x : cap * tanhf(x / cap);
}

extern __shared__ float shared[];

extern "C" __global__ void __launch_bounds__(THREADS) loss_sums(const Job job) {
    const i64 row = blockIdx.x, from = row * job.width;
    LogSumExp partial = {NEGATIVE_INFINITY, 0.0f};
    float x[AT_ONCE];
#pragma unroll 4
    for (i64 column = threadIdx.x * AT_ONCE; column < job.width; column += THREADS * AT_ONCE) {
        read<X_TYPE>(x, job.logits, from + column);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            x[n] = capped(x[n], job.softcap);
        }
        take(partial, x);
    }
    for (int distance = 16; distance > 0; distance /= 2) {
        const float max = __shfl_xor_sync(0xFFFFFFFFu, partial.max, distance);
        partial = both(partial, {max, __shfl_xor_sync(0xFFFFFFFFu, partial.sum, distance)});
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
        partial = both(partial, {shared[warp], shared[WARPS + warp]});
    }
    const i64 place = (i64)job.targets[row] - job.first;
    float *sums = job.sums + row * 3;
    sums[0] = partial.max;
    sums[1] = partial.sum;
    sums[2] = 0 <= place && place < job.width ? capped(element<X_TYPE>(job.logits, from + place), job.softcap) : 0.0f;
}

// scale * (softmax - 1 at the target), by sums over the whole vocabulary; 0 where there is no target.
extern "C" __global__ void __launch_bounds__(THREADS) loss_gradient(const Job job) {
    const i64 row = blockIdx.x, from = row * job.width;
    const u32 target = job.targets[row];
    const i64 place = (i64)target - job.first;
    const float max = job.sums[row * 3], factor = job.scale / job.sums[row * 3 + 1];
    for (i64 column = threadIdx.x * AT_ONCE; column < job.width; column += THREADS * AT_ONCE) {
        float x[AT_ONCE];
        read<X_TYPE>(x, job.logits, from + column);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const float y = capped(x[n], job.softcap);
            const float slope = job.softcap == 0.0f ? 1.0f : 1.0f - (y / job.softcap) * (y / job.softcap);
            x[n] = (expf(y - max) * factor - (column + n == place ? job.scale : 0.0f)) * slope;
            x[n] = target == NO_TARGET ? 0.0f : x[n];
        }
        write<W_TYPE>(job.gradient, from + column, x);
    }
}
