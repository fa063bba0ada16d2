// Gradients of the scores on tensor cores, which the backward passes by warps and by warpgroups share. This source follows
// `tensor.cu`.

// Numbers that the forward pass saved of the thread's two queries of a head.
__device__ inline void load_saved(const Params &params, int head, int first, Saved (&queries)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int token = first + THREAD_ROW + 8 * half;
        const i64 state = (i64)head * params.queries + token;
        queries[half] = token < params.queries ? saved(params, state) : Saved{NEGATIVE_INFINITY, 0.0f, 0.0f};
    }
}

// For the thread's queries and the keys from row `base` on: replaces unscaled products by their gradients. dp are the gradients
// of the weights.
__device__ inline void differentiate_queries(const Params &params, const Tile &tile, const VisibleRows &visible, int head, int first, int base,
                                             const Saved (&queries)[2], float (&products)[TILES][4],
                                             const float (&dp)[TILES][4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = first + THREAD_ROW + 8 * half - tile.q;
#pragma unroll
        for (int n = 0; n < TILES; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int key = n * 8 + THREAD_COLUMN + e, at = 2 * half + e;
                float ds = 0.0f;
                if (visible(half, key)) {
                    const int j = base + key - tile.k;
                    ds = pair(params, tile, head, i, j, products[n][at], dp[n][at], queries[half]).ds;
                }
                products[n][at] = ds;
            }
        }
    }
}

// Numbers that the forward pass saved of a chunk of queries, in shared memory: all maxima, then all inverse sums, then all deltas,
// so that one address leads to all three numbers of a query. An array of structures needed one more register than there is.
struct SavedChunk {
    float *values;

    __device__ inline Saved operator[](int query) const {
        return {values[query], values[CHUNK + query], values[2 * CHUNK + query]};
    }

    __device__ inline void store(int query, const Saved &saved) const {
        values[query] = saved.max;
        values[CHUNK + query] = saved.inverse_sum;
        values[2 * CHUNK + query] = saved.delta;
    }
};

// For the thread's keys and the queries from row `base` on: replaces unscaled products by weights, and gradients of weights by
// gradients of products.
__device__ inline void differentiate_keys(const Params &params, const Tile &tile, const VisibleRows &visible, int head, int first, int base,
                                          const SavedChunk &queries, float (&products)[TILES][4],
                                          float (&dp)[TILES][4]) {
#pragma unroll
    for (int n = 0; n < TILES; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            // Both halves of the keys are computed at once: otherwise the numbers of a query would stay in registers for the second.
            const int query = n * 8 + THREAD_COLUMN + e, i = base + query - tile.q;
            const Saved known = queries[query];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int j = first + THREAD_ROW + 8 * half - tile.k, at = 2 * half + e;
                Pair got = {0.0f, 0.0f, 0.0f};
                if (visible(half, query)) {
                    got = pair(params, tile, head, i, j, products[n][at], dp[n][at], known);
                }
                products[n][at] = got.weight;
                dp[n][at] = got.ds;
            }
        }
    }
}
