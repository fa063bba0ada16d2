// The backward pass by warpgroups: the two kernels of `tensor_backward.cu`. The next chunk is copied while this one is computed,
// and while one of the two warpgroups of a block multiplies, the other computes gradients of scores.

#define OWN (ROWS * WIDTH)
#define V_OWN (ROWS * V_WIDTH)
#define OTHERS (CHUNK * WHOLE_WIDTH)
#define V_OTHERS (CHUNK * WHOLE_V_WIDTH)

// The rows that a block computes, and two buffers for the rows it reads: one is read while the other is filled.
struct SharedMemory {
    u16 *own, *v_own, *others, *v_others;
    SavedChunk queries[2];

    __device__ SharedMemory(float *shared) {
        own = (u16 *)shared;
        v_own = own + OWN;
        others = v_own + V_OWN;
        v_others = others + 2 * OTHERS;
        queries[0].values = (float *)(v_others + 2 * V_OTHERS);
        queries[1].values = queries[0].values + 3 * CHUNK;
        clear_cores<DIM, WIDTH, ROWS>(own);
        clear_cores<V_DIM, V_WIDTH, ROWS>(v_own);
        for (int stage = 0; stage < 2; stage++) {
            clear_cores<DIM, WIDTH, CHUNK>(others + stage * OTHERS);
            clear_cores<V_DIM, V_WIDTH, CHUNK>(v_others + stage * V_OTHERS);
        }
    }
};

// Starts the products of own and other rows: the scores, and the gradients of the weights.
__device__ inline void multiply_both(float (&scores)[TILES][4], float (&dp)[TILES][4], const SharedMemory &shared_memory, int stage) {
    order_registers();
    start_scores<WIDTH>(scores, shared_memory.own, shared_memory.others + stage * OTHERS);
    start_scores<V_WIDTH>(dp, shared_memory.v_own, shared_memory.v_others + stage * V_OTHERS);
    group_products();
    wait_products<0>();
    take_sums(scores);
    take_sums(dp);
}

// Computes dq of ROWS queries of one head.
extern "C" __global__ void __launch_bounds__(THREADS) backward_queries(const Params params) {
    extern __shared__ float shared[];
    const int block = gridDim.x - 1 - blockIdx.x, head = blockIdx.y, kv_head = params.kv_of[head];
    if (params.parts_of[block] == params.parts_of[block + 1]) {
        return;
    }
    const int first = block * ROWS, rows = min(ROWS, params.queries - first);
    const SharedMemory shared_memory(shared);
    const auto start = [&](const Chunk &chunk, int stage) {
        const int count = chunk.count(params);
        start_cores<K_TYPE, DIM, CHUNK>(shared_memory.others + stage * OTHERS, params.k, chunk.base, count, kv_head);
        start_cores<V_TYPE, V_DIM, CHUNK>(shared_memory.v_others + stage * V_OTHERS, params.v, chunk.base, count, kv_head);
    };
    start_cores<Q_TYPE, DIM, ROWS>(shared_memory.own, params.q, first, rows, head);
    start_cores<D_OUT_TYPE, V_DIM, ROWS>(shared_memory.v_own, params.d_out, first, rows, head);
    Chunk chunk(params, block);
    start(chunk, 0);
    group_copies();
    Saved queries[2];
    float sums[WHOLE_WIDTH / 8][4], scores[TILES][4], dp[TILES][4];
    load_saved(params, head, first, queries);
    clear(sums);
    clear(scores);
    clear(dp);
    for (int stage = 0; chunk.is_there(params, block); stage ^= 1) {
        const Tile tile = params.tiles[params.parts[chunk.part].tile];
        const int base = chunk.base, count = chunk.count(params);
        u16 *const k = shared_memory.others + stage * OTHERS;
        const bool whole = sees_all(tile, first, rows, base, count);
        wait_copies<0>();
        share_copies();
        const bool has_special = __syncthreads_or(!whole && has_non_finite_core<DIM>(k));
        chunk.advance(params, block);
        if (chunk.is_there(params, block)) {
            start(chunk, stage ^ 1);
        }
        group_copies();
        multiply_both(scores, dp, shared_memory, stage);
        const VisibleRows visible = VisibleRows::by_queries(params, tile, first, base, count);
        differentiate_queries(params, tile, visible, head, first, base, queries, scores, dp);
        u32 weights[STEPS][4];
        pack(weights, scores);
        if (has_special) {
            add_visible_cores(sums, weights, k, visible);
            forget<DIM>(k);
        }
        order_registers();
        start_sums(sums, weights, k);
        group_products();
        wait_products<0>();
        take_sums(sums);
    }
    add_rows<DIM>(params.dq, sums, first, params.queries, params.heads, head);
}

// Computes dk and dv of ROWS keys of one key-value head. The parts are those of blocks of keys.
extern "C" __global__ void __launch_bounds__(THREADS) backward_keys(const Params params) {
    extern __shared__ float shared[];
    const int block = blockIdx.x, kv_head = blockIdx.y;
    if (params.parts_of[block] == params.parts_of[block + 1]) {
        return;
    }
    const int first = block * ROWS, rows = min(ROWS, params.keys - first), end = params.heads_of[kv_head + 1];
    const SharedMemory shared_memory(shared);
    const auto start = [&](const Chunk &chunk, int head, int stage) {
        const int count = chunk.count(params);
        start_cores<Q_TYPE, DIM, CHUNK>(shared_memory.others + stage * OTHERS, params.q, chunk.base, count, head);
        start_cores<D_OUT_TYPE, V_DIM, CHUNK>(shared_memory.v_others + stage * V_OTHERS, params.d_out, chunk.base, count, head);
        if (threadIdx.x < count) {
            const i64 state = (i64)head * params.queries + chunk.base + threadIdx.x;
            shared_memory.queries[stage].store(threadIdx.x, saved(params, state));
        }
    };
    start_cores<K_TYPE, DIM, ROWS>(shared_memory.own, params.k, first, rows, kv_head);
    start_cores<V_TYPE, V_DIM, ROWS>(shared_memory.v_own, params.v, first, rows, kv_head);
    const Chunk begin(params, block);
    Chunk chunk = begin;
    int head = params.heads_of[kv_head];
    if (head < end) {
        start(chunk, head, 0);
    }
    group_copies();
    float dk[WHOLE_WIDTH / 8][4], dv[WHOLE_V_WIDTH / 8][4], scores[TILES][4], dp[TILES][4];
    clear(dk);
    clear(dv);
    clear(scores);
    clear(dp);
    for (int stage = 0; head < end; stage ^= 1) {
        const Tile tile = params.tiles[params.parts[chunk.part].tile];
        const int base = chunk.base, count = chunk.count(params), this_head = head;
        u16 *const q = shared_memory.others + stage * OTHERS, *const d_out = shared_memory.v_others + stage * V_OTHERS;
        const SavedChunk &queries = shared_memory.queries[stage];
        const bool whole = sees_all(tile, base, count, first, rows);
        wait_copies<0>();
        share_copies();
        const bool has_special =
            __syncthreads_or(!whole && (has_non_finite_core<DIM>(q) || has_non_finite_core<V_DIM>(d_out)));
        chunk.advance(params, block);
        if (!chunk.is_there(params, block)) {
            chunk = begin;
            head++;
        }
        if (head < end) {
            start(chunk, head, stage ^ 1);
        }
        group_copies();
        multiply_both(scores, dp, shared_memory, stage);
        const VisibleRows visible = VisibleRows::by_keys(params, tile, first, base, count);
        differentiate_keys(params, tile, visible, this_head, first, base, queries, scores, dp);
        u32 weights[STEPS][4], ds[STEPS][4];
        pack(weights, scores);
        pack(ds, dp);
        if (has_special) {
            add_visible_cores(dv, weights, d_out, visible);
            add_visible_cores(dk, ds, q, visible);
            forget<DIM>(q);
            forget<V_DIM>(d_out);
        }
        order_registers();
        start_sums(dv, weights, d_out);
        start_sums(dk, ds, q);
        group_products();
        wait_products<0>();
        take_sums(dv);
        take_sums(dk);
    }
    add_rows<DIM>(params.dk, dk, first, params.keys, params.kv_heads, kv_head);
    add_rows<V_DIM>(params.dv, dv, first, params.keys, params.kv_heads, kv_head);
}
