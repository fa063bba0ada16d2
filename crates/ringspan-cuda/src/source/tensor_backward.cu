// The backward pass on tensor cores: the two kernels of `backward.cu` with products of bf16, without bias and buckets.

// Computes dq of ROWS queries of one head.
extern "C" __global__ void __launch_bounds__(THREADS) backward_queries(const Params params) {
    extern __shared__ float shared[];
    u16 *const q = (u16 *)shared, *const d_out = q + ROWS * STRIDE;
    u16 *const k = d_out + ROWS * V_STRIDE, *const v = k + CHUNK * STRIDE;
    const int block = gridDim.x - 1 - blockIdx.x, head = blockIdx.y, kv_head = params.kv_of[head];
    if (params.parts_of[block] == params.parts_of[block + 1]) {
        return;
    }
    const int first = block * ROWS, rows = min(ROWS, params.queries - first);
    clear_rest<DIM, STRIDE>(q, ROWS);
    clear_rest<V_DIM, V_STRIDE>(d_out, ROWS);
    clear_rest<DIM, STRIDE>(k, CHUNK);
    clear_rest<V_DIM, V_STRIDE>(v, CHUNK);
    start_rows<Q_TYPE, DIM, STRIDE, ROWS>(q, params.q, first, rows, head);
    start_rows<D_OUT_TYPE, V_DIM, V_STRIDE, ROWS>(d_out, params.d_out, first, rows, head);
    Saved queries[2];
    float sums[WIDTH / 8][4];
    load_saved(params, head, first, queries);
    clear(sums);
    for (Chunk chunk(params, block); chunk.is_there(params, block); chunk.advance(params, block)) {
        const Tile tile = params.tiles[params.parts[chunk.part].tile];
        const int base = chunk.base, count = chunk.count(params);
        __syncthreads(); // All threads have used the previous chunk.
        start_rows<K_TYPE, DIM, STRIDE, CHUNK>(k, params.k, base, count, kv_head);
        start_rows<V_TYPE, V_DIM, V_STRIDE, CHUNK>(v, params.v, base, count, kv_head);
        group_copies();
        wait_copies<0>();
        const bool whole = sees_all(tile, first, rows, base, count);
        const bool has_special = __syncthreads_or(!whole && has_non_finite<DIM, STRIDE>(k));
        float scores[TILES][4], dp[TILES][4];
        products<WIDTH, STRIDE>(scores, q, k);
        products<V_WIDTH, V_STRIDE>(dp, d_out, v);
        const VisibleRows visible = VisibleRows::by_queries(params, tile, first, base, count);
        differentiate_queries(params, tile, visible, head, first, base, queries, scores, dp);
        add_chunk<WIDTH, STRIDE>(sums, scores, k, visible, has_special);
    }
    add_rows<DIM>(params.dq, sums, first, params.queries, params.heads, head);
}

// Computes dk and dv of ROWS keys of one key-value head. The parts are those of blocks of keys.
extern "C" __global__ void __launch_bounds__(THREADS) backward_keys(const Params params) {
    extern __shared__ float shared[];
    u16 *const k = (u16 *)shared, *const v = k + ROWS * STRIDE;
    u16 *const q = v + ROWS * V_STRIDE, *const d_out = q + CHUNK * STRIDE;
    const SavedChunk queries = {(float *)(d_out + CHUNK * V_STRIDE)};
    const int block = blockIdx.x, kv_head = blockIdx.y;
    if (params.parts_of[block] == params.parts_of[block + 1]) {
        return;
    }
    const int first = block * ROWS, rows = min(ROWS, params.keys - first);
    clear_rest<DIM, STRIDE>(k, ROWS);
    clear_rest<V_DIM, V_STRIDE>(v, ROWS);
    clear_rest<DIM, STRIDE>(q, CHUNK);
    clear_rest<V_DIM, V_STRIDE>(d_out, CHUNK);
    start_rows<K_TYPE, DIM, STRIDE, ROWS>(k, params.k, first, rows, kv_head);
    start_rows<V_TYPE, V_DIM, V_STRIDE, ROWS>(v, params.v, first, rows, kv_head);
    float dk[WIDTH / 8][4], dv[V_WIDTH / 8][4];
    clear(dk);
    clear(dv);
    for (int head = params.heads_of[kv_head]; head < params.heads_of[kv_head + 1]; head++) {
        for (Chunk chunk(params, block); chunk.is_there(params, block); chunk.advance(params, block)) {
            const Tile tile = params.tiles[params.parts[chunk.part].tile];
            const int base = chunk.base, count = chunk.count(params);
            __syncthreads(); // All threads have used the previous chunk.
            start_rows<Q_TYPE, DIM, STRIDE, CHUNK>(q, params.q, base, count, head);
            start_rows<D_OUT_TYPE, V_DIM, V_STRIDE, CHUNK>(d_out, params.d_out, base, count, head);
            group_copies();
            if (threadIdx.x < count) {
                queries.store(threadIdx.x, saved(params, (i64)head * params.queries + base + threadIdx.x));
            }
            wait_copies<0>();
            const bool whole = sees_all(tile, base, count, first, rows);
            const bool has_special = __syncthreads_or(
                !whole && (has_non_finite<DIM, STRIDE>(q) || has_non_finite<V_DIM, V_STRIDE>(d_out)));
            float weights[TILES][4], ds[TILES][4];
            products<WIDTH, STRIDE>(weights, k, q);
            products<V_WIDTH, V_STRIDE>(ds, v, d_out);
            const VisibleRows visible = VisibleRows::by_keys(params, tile, first, base, count);
            differentiate_keys(params, tile, visible, head, first, base, queries, weights, ds);
            add_chunk<V_WIDTH, V_STRIDE>(dv, weights, d_out, visible, has_special);
            add_chunk<WIDTH, STRIDE>(dk, ds, q, visible, has_special);
        }
    }
    add_rows<DIM>(params.dk, dk, first, params.keys, params.kv_heads, kv_head);
    add_rows<V_DIM>(params.dv, dv, first, params.keys, params.kv_heads, kv_head);
}
