// The forward pass on tensor cores: like `forward.cu`, with products of bf16 (Dao, 2023). Keys of the next chunk and values of
// this one are copied while products are computed.

extern "C" __global__ void __launch_bounds__(THREADS) forward(const Params params) {
    extern __shared__ float shared[];
    u16 *const q = (u16 *)shared, *const k = q + ROWS * STRIDE, *const v = k + CHUNK * STRIDE;

    // Under causal masks the last queries have the most work, so they start first.
    const int block = gridDim.x - 1 - blockIdx.x, head = blockIdx.y, kv_head = params.kv_of[head];
    if (params.parts_of[block] == params.parts_of[block + 1]) {
        return;
    }
    const int first = block * ROWS, rows = min(ROWS, params.queries - first);
    clear_rest<DIM, STRIDE>(q, ROWS);
    clear_rest<DIM, STRIDE>(k, CHUNK);
    clear_rest<V_DIM, V_STRIDE>(v, CHUNK);
    Chunk chunk(params, block);
    start_rows<Q_TYPE, DIM, STRIDE, ROWS>(q, params.q, first, rows, head);
    start_rows<K_TYPE, DIM, STRIDE, CHUNK>(k, params.k, chunk.base, chunk.count(params), kv_head);
    group_copies();

    float greatest[2], sum[2], values[V_WIDTH / 8][4];
    load_state(params, head, first, greatest, sum, values);

    while (chunk.is_there(params, block)) {
        const Tile tile = params.tiles[params.parts[chunk.part].tile];
        const int base = chunk.base, count = chunk.count(params);
        const bool whole = sees_all(tile, first, rows, base, count);
        __syncthreads(); // All threads have used the values before these.
        start_rows<V_TYPE, V_DIM, V_STRIDE, CHUNK>(v, params.v, base, count, kv_head);
        group_copies();
        wait_copies<1>();
        __syncthreads(); // The keys have been copied.
        float scores[TILES][4];
        products<WIDTH, STRIDE>(scores, q, k);
        __syncthreads(); // All threads have used the keys.
        chunk.advance(params, block);
        if (chunk.is_there(params, block)) {
            start_rows<K_TYPE, DIM, STRIDE, CHUNK>(k, params.k, chunk.base, chunk.count(params), kv_head);
        }
        group_copies();

        const VisibleRows visible = VisibleRows::by_queries(params, tile, first, base, count);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = first + THREAD_ROW + 8 * half - tile.q;
            float most = greatest[half];
#pragma unroll
            for (int n = 0; n < TILES; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int key = n * 8 + THREAD_COLUMN + e;
                    if (visible(half, key)) {
                        float slope, &s = scores[n][2 * half + e];
                        s = score(params, tile, head, i, base + key - tile.k, s, slope);
                        most = fmaxf(most, s);
                    }
                }
            }
            most = of_four(most, true);
            // The shift is finite, so that subtracting it from -inf gives no NaN.
            const float shift = most == NEGATIVE_INFINITY ? 0.0f : most;
            const float shrink = exp2f((greatest[half] - shift) * LOG2_E);
            greatest[half] = most;
            sum[half] *= shrink;
#pragma unroll
            for (int n = 0; n < V_WIDTH / 8; n++) {
                values[n][2 * half] *= shrink;
                values[n][2 * half + 1] *= shrink;
            }
#pragma unroll
            for (int n = 0; n < TILES; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int key = n * 8 + THREAD_COLUMN + e;
                    float weight = 0.0f;
                    if (visible(half, key)) {
                        weight = exp2f((scores[n][2 * half + e] - shift) * LOG2_E);
                        sum[half] += weight;
                        weight *= kept(params, tile, head, i, base + key - tile.k);
                    }
                    scores[n][2 * half + e] = weight;
                }
            }
        }
        wait_copies<1>();
        const bool has_special = __syncthreads_or(!whole && has_non_finite<V_DIM, V_STRIDE>(v)); // The values have been copied.
        add_chunk<V_WIDTH, V_STRIDE>(values, scores, v, visible, has_special);
    }
    store_state(params, head, first, greatest, sum, values);
}
