// Shared by the attention kernels: the params of a launch, reads of tensors, scores, dropout.
//
// This source follows `element.cu` and is compiled at run time for one set of shapes, by these macros:
//   DIM, V_DIM           head widths D and Dv
//   ROWS, THREADS        rows of a block, of queries and of keys; threads of a block, SPLIT of them for each row
//   Q_TYPE .. OUT_TYPE   types of stored elements: F32, BF16 or F16
//   SOFTCAP, ALIBI, BUCKETS, BIAS, DROPOUT   whether scores have these terms
//   PARAMS_BYTES            size of Params on the host
// All sums are f32. A query sees one run of keys of a tile, and a key is seen by one run of queries, so loops over these runs
// read no invisible key: a NaN there does not spread.

#define SPLIT (THREADS / ROWS)
#define PAIRS (ROWS / SPLIT)

// A tensor [tokens, heads, width]; strides in elements.
struct View {
    const void *data;
    i64 token_stride, head_stride;
};

// Query i sees key j iff lo <= i - j <= hi, in rows of the tile. Query row 0 is token `query` of the batch, key row 0 token
// `key` of its batch row, and their positions differ by `distance`; neighbouring rows are `step` tokens apart.
struct Tile {
    int q, queries, k, keys, lo, hi;
    i64 query, key, distance, step;
};

// The part of a tile that a block of rows computes with: rows from .. to of the other side.
struct TilePart {
    int tile, from, to;
};

struct Params {
    View q, k, v, bias, d_out;
    const Tile *tiles;
    const TilePart *parts;
    // Parts parts_of[b] .. parts_of[b + 1] belong to block b.
    const int *parts_of;
    // The key-value head of each query head [H]; the first query head of each key-value head, and H at the end [G + 1].
    const int *kv_of, *heads_of;
    // Slopes of ALiBi [H], or terms of relative buckets [H, buckets].
    const float *terms;
    // The smallest distance of each bucket of one direction.
    const i64 *first;
    // The softmax state; in the backward pass, max and sum are the final ones.
    float *out, *max, *sum;
    const float *delta;
    // Sums to which gradients are added; d_bias is [queries, bias_heads, bias_keys].
    float *dq, *dk, *dv, *d_bias;
    // Gradients of bucket terms from each block of queries [blocks, H, buckets], and their sum over blocks [H, buckets].
    double *d_table;
    float *d_table_sum;
    u64 seed, first_query;
    int queries, keys, heads, kv_heads, bias_heads, bias_keys, buckets, buckets_of_one, blocks, first_head;
    u32 threshold;
    float scale, softcap, dropout_scale;
};

static_assert(sizeof(Params) == PARAMS_BYTES, "the params as the host fills it");

// Copies rows first .. first + count of a head to shared memory, with all threads of the block.
template <int TYPE, int WIDTH>
__device__ void load(float (*to)[WIDTH + 1], const View &from, int first, int count, int head) {
    for (int n = threadIdx.x; n < count * WIDTH; n += THREADS) {
        const int row = n / WIDTH, column = n % WIDTH;
        const i64 at = (first + row) * from.token_stride + head * from.head_stride + column;
        to[row][column] = element<TYPE>(from.data, at);
    }
}

__device__ inline i64 distance(const Tile &tile, int i, int j) { return tile.distance + tile.step * (i - j); }

#if BUCKETS
__device__ inline int bucket(const Params &params, i64 distance) {
    // Each direction has its own buckets, or keys ahead of the query count as distance 0.
    const int one = params.buckets_of_one;
    const int before = one < params.buckets && distance < 0 ? one : 0;
    const i64 size = distance < 0 ? (one < params.buckets ? -distance : 0) : distance;
    int low = 0, high = one;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (params.first[middle] <= size) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return before + low;
}
#endif

// The score of query i and key j of a tile, and its derivative with respect to the scaled product. All passes must compute the
// same bits, so operations that a compiler might fuse in one pass only are written with explicit rounding.
__device__ inline float score(const Params &params, const Tile &tile, int head, int i, int j, float product, float &slope) {
    float s = __fmul_rn(params.scale, product);
    slope = 1.0f;
#if SOFTCAP
    const float share = tanhf(s / params.softcap);
    s = __fmul_rn(params.softcap, share);
    slope = 1.0f - share * share;
#endif
#if ALIBI
    s = __fmaf_rn(-params.terms[head], fabsf((float)distance(tile, i, j)), s);
#endif
#if BUCKETS
    s += params.terms[head * params.buckets + bucket(params, distance(tile, i, j))];
#endif
#if BIAS
    const i64 row = (tile.q + i) * params.bias.token_stride + (params.bias_heads == 1 ? 0 : head) * params.bias.head_stride;
    s += element<BIAS_TYPE>(params.bias.data, row + tile.key + j * tile.step);
#endif
    return s;
}

#if DROPOUT
// SplitMix64's output function (Steele et al., 2014).
__device__ inline u64 mix(u64 x) {
    u64 z = x + 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}
#endif

// The factor of dropout for query i and key j, as on the CPU: 0, or 1 / (1 - rate).
__device__ inline float kept(const Params &params, const Tile &tile, int head, int i, int j) {
#if DROPOUT
    const u64 query = params.first_query + (u64)(tile.query + i * tile.step), key = (u64)(tile.key + j * tile.step);
    const u64 row = mix(mix(params.seed ^ mix((u64)(params.first_head + head) + 1)) ^ query);
    u32 x = ((u32)row ^ (u32)mix(key)) * 0x9E3779B1u;
    x = ((x ^ x >> 15) + (u32)(row >> 32)) * 0x85EBCA77u;
    x = (x ^ x >> 13) * 0xC2B2AE3Du;
    return (x ^ x >> 16) >= params.threshold ? params.dropout_scale : 0.0f;
#else
    return 1.0f;
#endif
}

// The contribution of a query-key pair to gradients.
struct Pair {
    // The weight after dropout, the gradient of the score, and the gradient of the unscaled product.
    float weight, term, ds;
};

// Numbers of a query that the forward pass saved.
struct Saved {
    // The greatest score, or -inf if the query sees no key; 1 / the sum of exponentials relative to it; the row sum of
    // out * d_out.
    float max, inverse_sum, delta;
};

// The saved numbers at index `at` of [H, Tq].
__device__ inline Saved saved(const Params &params, i64 at) {
    // fmaxf ignores NaN, so only the sum shows it.
    const float sum = params.sum[at];
    return {sum == sum ? params.max[at] : sum, 1.0f / sum, params.delta[at]};
}

__device__ inline Pair pair(const Params &params, const Tile &tile, int head, int i, int j, float product, float dp,
                            const Saved &query) {
    Pair result = {0.0f, 0.0f, 0.0f};
    if (query.max != NEGATIVE_INFINITY) {
        float slope;
        const float below = score(params, tile, head, i, j, product, slope) - query.max;
        // It exceeds 0 only if the forward pass used other units (tensor cores) for the product; a NaN stays NaN.
        const float weight = expf(below > 0.0f ? 0.0f : below) * query.inverse_sum;
        const float kept_part = kept(params, tile, head, i, j);
        result.weight = weight * kept_part;
        result.term = weight * (dp * kept_part - query.delta);
        result.ds = result.term * slope * params.scale;
    }
    return result;
}
