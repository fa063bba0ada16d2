// The forward pass by warpgroups: like `tensor_forward.cu`, but products of the next chunk's scores run while the values of this
// one are added up, and both run while weights are computed (Shah et al., 2024). Keys and values of later chunks are copied
// meanwhile, so a chunk has one barrier.

#define QUERIES (ROWS * WIDTH)
#define KEYS (CHUNK * WIDTH)
#define VALUES (CHUNK * WHOLE_V_WIDTH)

// Whether scores are products times a positive number, so that the greatest score is that of the greatest product.
constexpr bool PLAIN = !(SOFTCAP || ALIBI || BUCKETS || BIAS);

// The softmax of the thread's two rows.
struct Rows {
    float greatest[2], sum[2];
    // Factor of the sums before the last chunk.
    float shrink[2];
};

// Sets scores of invisible pairs to -inf, and adds the terms of the others.
__device__ inline void show(const Params &params, const Chunk &chunk, const Tile &tile, int head, int first, int rows_there,
                            float (&scores)[TILES][4]) {
    const int count = chunk.count(params);
    if (PLAIN && count == CHUNK && sees_all(tile, first, rows_there, chunk.base, count)) {
        return;
    }
    const VisibleRows visible = VisibleRows::by_queries(params, tile, first, chunk.base, count);
#pragma unroll
    for (int n = 0; n < TILES; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int key = n * 8 + THREAD_COLUMN + e % 2, i = first + THREAD_ROW + e / 2 * 8 - tile.q;
            if (!visible(e / 2, key)) {
                scores[n][e] = NEGATIVE_INFINITY;
            } else if (!PLAIN) {
                float slope;
                scores[n][e] = score(params, tile, head, i, chunk.base + key - tile.k, scores[n][e], slope);
            }
        }
    }
}

// Turns scores into weights.
__device__ inline void soften(const Params &params, const Chunk &chunk, int head, int first, int rows_there,
                              float (&scores)[TILES][4], Rows &rows) {
    const Tile tile = params.tiles[params.parts[chunk.part].tile];
    const float factor = PLAIN ? params.scale : 1.0f;
    show(params, chunk, tile, head, first, rows_there, scores);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = NEGATIVE_INFINITY;
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            most = fmaxf(most, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
        }
        most = fmaxf(rows.greatest[half], of_four(most, true) * factor);
        // The shift is finite, so that subtracting it from -inf gives no NaN.
        const float shift = most == NEGATIVE_INFINITY ? 0.0f : most;
        rows.shrink[half] = power_of_2((rows.greatest[half] - shift) * LOG2_E);
        rows.greatest[half] = most;
        rows.sum[half] *= rows.shrink[half];
#pragma unroll
        for (int n = 0; n < TILES; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &s = scores[n][2 * half + e];
                // The score is rounded before the maximum is subtracted, as the maximum was: so no weight exceeds 1.
                s = power_of_2((__fmul_rn(s, factor) - shift) * LOG2_E);
                rows.sum[half] += s;
                if (DROPOUT) {
                    const int i = first + THREAD_ROW + 8 * half - tile.q;
                    s *= kept(params, tile, head, i, chunk.base + n * 8 + THREAD_COLUMN + e - tile.k);
                }
            }
        }
    }
}

// Waits for the values of a chunk, and for the other threads. If some values are NaN or infinite, they are added here pair by pair,
// and replaced by zeros.
__device__ inline void settle_values(const Params &params, const Chunk &chunk, int first, int rows_there,
                                     float (&values)[WHOLE_V_WIDTH / 8][4], const u32 (&weights)[STEPS][4], u16 *v) {
    const Tile tile = params.tiles[params.parts[chunk.part].tile];
    const int count = chunk.count(params);
    wait_copies<0>();
    share_copies();
    const bool whole = sees_all(tile, first, rows_there, chunk.base, count);
    if (__syncthreads_or(!whole && has_non_finite_core<V_DIM>(v))) {
        add_visible_cores(values, weights, v, VisibleRows::by_queries(params, tile, first, chunk.base, count));
        forget<V_DIM>(v);
    }
}

__device__ inline void scale(float (&values)[WHOLE_V_WIDTH / 8][4], const float (&shrink)[2]) {
#pragma unroll
    for (int n = 0; n < WHOLE_V_WIDTH / 8; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            values[n][e] *= shrink[e / 2];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) forward(const Params params) {
    extern __shared__ float shared[];
    // Two buffers each: one is read while the other is filled.
    u16 *const q = (u16 *)shared, *const k = q + QUERIES, *const v = k + 2 * KEYS;

    // Under causal masks the last queries have the most work, so they start first.
    const int block = gridDim.x - 1 - blockIdx.x, head = blockIdx.y, kv_head = params.kv_of[head];
    if (params.parts_of[block] == params.parts_of[block + 1]) {
        return;
    }
    const int first = block * ROWS, rows_there = min(ROWS, params.queries - first);
    clear_cores<DIM, WIDTH, ROWS>(q);
    for (int stage = 0; stage < 2; stage++) {
        clear_cores<DIM, WIDTH, CHUNK>(k + stage * KEYS);
    }
    Chunk chunk(params, block), next = chunk;
    next.advance(params, block);
    start_cores<Q_TYPE, DIM, ROWS>(q, params.q, first, rows_there, head);
    start_cores<K_TYPE, DIM, CHUNK>(k, params.k, chunk.base, chunk.count(params), kv_head);
    group_copies();
    start_cores<V_TYPE, V_DIM, CHUNK>(v, params.v, chunk.base, chunk.count(params), kv_head);
    if (next.is_there(params, block)) {
        start_cores<K_TYPE, DIM, CHUNK>(k + KEYS, params.k, next.base, next.count(params), kv_head);
    }
    group_copies();

    Rows rows;
    float values[WHOLE_V_WIDTH / 8][4];
    load_state(params, head, first, rows.greatest, rows.sum, values);
    float scores[TILES][4];
    u32 weights[STEPS][4];
    clear(scores);
    wait_copies<1>();
    share_copies();
    __syncthreads(); // The queries and the first keys have been copied.
    order_registers();
    start_scores<WIDTH>(scores, q, k);
    group_products();
    wait_products<0>();
    take_sums(scores);
    soften(params, chunk, head, first, rows_there, scores, rows);
    pack(weights, scores);
    scale(values, rows.shrink);

    int stage = 0;
    for (; next.is_there(params, block); stage ^= 1) {
        // The weights of this chunk are computed; its values and the next keys are being copied.
        settle_values(params, chunk, first, rows_there, values, weights, v + stage * VALUES);
        // They go where the keys of this chunk and the values of the one before were.
        Chunk after = next;
        after.advance(params, block);
        start_cores<V_TYPE, V_DIM, CHUNK>(v + (stage ^ 1) * VALUES, params.v, next.base, next.count(params), kv_head);
        if (after.is_there(params, block)) {
            start_cores<K_TYPE, DIM, CHUNK>(k + stage * KEYS, params.k, after.base, after.count(params), kv_head);
        }
        group_copies();
        order_registers();
        start_scores<WIDTH>(scores, q, k + (stage ^ 1) * KEYS);
        group_products();
        start_sums(values, weights, v + stage * VALUES);
        group_products();
        wait_products<1>();
        take_sums(scores);
        soften(params, next, head, first, rows_there, scores, rows);
        wait_products<0>();
        take_sums(values);
        pack(weights, scores);
        scale(values, rows.shrink);
        chunk = next;
        next = after;
    }
    settle_values(params, chunk, first, rows_there, values, weights, v + stage * VALUES);
    order_registers();
    start_sums(values, weights, v + stage * VALUES);
    group_products();
    wait_products<0>();
    take_sums(values);
    store_state(params, head, first, rows.greatest, rows.sum, values);
}
