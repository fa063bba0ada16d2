// The backward pass (Dao et al., 2022, appendix B.2), in two kernels that both recompute the weights: one sums over keys, one
// over queries. No sum has two writers, so the same inputs give the same bits.

#define COLUMNS ((DIM + SPLIT - 1) / SPLIT)
#define V_COLUMNS ((V_DIM + SPLIT - 1) / SPLIT)

// Shared memory of a block of threads.
struct Buffers {
    float (*q)[DIM + 1], (*k)[DIM + 1], (*v)[V_DIM + 1], (*d_out)[V_DIM + 1];
    // Weights, and gradients of the unscaled products.
    float (*weights)[ROWS + 1], (*ds)[ROWS + 1];
    // Gradients of scores, and their buckets; -1 for invisible pairs.
    float (*terms)[ROWS + 1];
    int (*buckets)[ROWS + 1];
};

__device__ inline Buffers buffers(float *shared) {
    Buffers all;
    all.q = (float(*)[DIM + 1])shared;
    all.k = all.q + ROWS;
    all.v = (float(*)[V_DIM + 1])(all.k + ROWS);
    all.d_out = all.v + ROWS;
    all.weights = (float(*)[ROWS + 1])(all.d_out + ROWS);
    all.ds = all.weights + ROWS;
    all.terms = all.ds + ROWS;
    all.buckets = (int(*)[ROWS + 1])(all.terms + ROWS);
    return all;
}

// Computes dq of ROWS queries of one head, or of all heads one after the other if they share a bias; also d_bias and the gradients
// of bucket terms.
extern "C" __global__ void __launch_bounds__(THREADS) backward_queries(const Params params) {
    extern __shared__ float shared[];
    const Buffers all = buffers(shared);
    const int block = blockIdx.x;
    const int row = threadIdx.x / SPLIT, lane = threadIdx.x % SPLIT;
    const int first = block * ROWS, token = first + row;
    const bool in_range = token < params.queries;
    if (params.parts_of[block] == params.parts_of[block + 1]) {
        return;
    }
    for (int head = blockIdx.y; head < params.heads; head += gridDim.y) {
        const int kv_head = params.kv_of[head], rows = min(ROWS, params.queries - first);
        __syncthreads(); // All threads are done with the previous head.
        load<Q_TYPE, DIM>(all.q, params.q, first, rows, head);
        load<D_OUT_TYPE, V_DIM>(all.d_out, params.d_out, first, rows, head);
        float sums[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            sums[c] = 0.0f;
        }
        for (int part = params.parts_of[block]; part < params.parts_of[block + 1]; part++) {
            const Tile tile = params.tiles[params.parts[part].tile];
            const int to = params.parts[part].to;
            const int i = token - tile.q;
            const bool inside = in_range && 0 <= i && i < tile.queries;
            const int low = inside ? tile.k + max(i - tile.hi, 0) : 0;
            const int high = inside ? tile.k + min(i - tile.lo + 1, tile.keys) : 0;
            for (int base = params.parts[part].from; base < to; base += ROWS) {
                const int count = min(ROWS, to - base);
                __syncthreads();
                load<K_TYPE, DIM>(all.k, params.k, base, count, kv_head);
                load<V_TYPE, V_DIM>(all.v, params.v, base, count, kv_head);
                __syncthreads();
                float products[PAIRS], dp[PAIRS];
#pragma unroll
                for (int p = 0; p < PAIRS; p++) {
                    products[p] = dp[p] = 0.0f;
                }
                for (int d = 0; d < DIM; d++) {
                    const float x = all.q[row][d];
#pragma unroll
                    for (int p = 0; p < PAIRS; p++) {
                        products[p] += x * all.k[lane + p * SPLIT][d];
                    }
                }
                for (int d = 0; d < V_DIM; d++) {
                    const float x = all.d_out[row][d];
#pragma unroll
                    for (int p = 0; p < PAIRS; p++) {
                        dp[p] += x * all.v[lane + p * SPLIT][d];
                    }
                }
                const int seen_from = max(low - base, 0), seen_to = min(high - base, count);
#pragma unroll
                for (int p = 0; p < PAIRS; p++) {
                    const int key = lane + p * SPLIT, j = base + key - tile.k;
                    const bool sees = seen_from <= key && key < seen_to;
                    if (sees) {
                        const i64 state = (i64)head * params.queries + token;
                        const Pair got = pair(params, tile, head, i, j, products[p], dp[p], saved(params, state));
                        all.ds[row][key] = got.ds;
#if BIAS
                        const i64 bias_row = (i64)token * params.bias_heads + (params.bias_heads == 1 ? 0 : head);
                        params.d_bias[bias_row * params.bias_keys + tile.key + j * tile.step] += got.term;
#endif
#if BUCKETS
                        all.terms[row][key] = got.term;
#endif
                    }
#if BUCKETS
                    all.buckets[row][key] = sees ? bucket(params, distance(tile, i, j)) : -1;
#endif
                }
                __syncthreads();
#if BUCKETS
                for (int b = threadIdx.x; b < params.buckets; b += THREADS) {
                    double sum = 0.0;
                    for (int r = 0; r < ROWS; r++) {
                        for (int key = 0; key < ROWS; key++) {
                            sum += all.buckets[r][key] == b ? all.terms[r][key] : 0.0f;
                        }
                    }
                    params.d_table[((i64)block * params.heads + head) * params.buckets + b] += sum;
                }
#endif
                for (int key = seen_from; key < seen_to; key++) {
                    const float ds = all.ds[row][key];
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) {
                        const int column = lane + c * SPLIT;
                        if (column < DIM) {
                            sums[c] += ds * all.k[key][column];
                        }
                    }
                }
            }
        }
        if (in_range) {
            float *const dq = params.dq + ((i64)token * params.heads + head) * DIM;
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                const int column = lane + c * SPLIT;
                if (column < DIM) {
                    dq[column] += sums[c];
                }
            }
        }
    }
}

// Computes dk and dv of ROWS keys of one key-value head. The parts are those of blocks of keys.
extern "C" __global__ void __launch_bounds__(THREADS) backward_keys(const Params params) {
    extern __shared__ float shared[];
    const Buffers all = buffers(shared);
    const int block = blockIdx.x, kv_head = blockIdx.y;
    const int row = threadIdx.x / SPLIT, lane = threadIdx.x % SPLIT;
    const int first = block * ROWS, token = first + row, rows = min(ROWS, params.keys - first);
    const bool in_range = token < params.keys;
    if (params.parts_of[block] == params.parts_of[block + 1]) {
        return;
    }
    load<K_TYPE, DIM>(all.k, params.k, first, rows, kv_head);
    load<V_TYPE, V_DIM>(all.v, params.v, first, rows, kv_head);
    float dk[COLUMNS], dv[V_COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        dk[c] = 0.0f;
    }
#pragma unroll
    for (int c = 0; c < V_COLUMNS; c++) {
        dv[c] = 0.0f;
    }
    for (int head = params.heads_of[kv_head]; head < params.heads_of[kv_head + 1]; head++) {
        for (int part = params.parts_of[block]; part < params.parts_of[block + 1]; part++) {
            const Tile tile = params.tiles[params.parts[part].tile];
            const int to = params.parts[part].to;
            const int j = token - tile.k;
            const bool inside = in_range && 0 <= j && j < tile.keys;
            const int low = inside ? tile.q + max(j + tile.lo, 0) : 0;
            const int high = inside ? tile.q + min(j + tile.hi + 1, tile.queries) : 0;
            for (int base = params.parts[part].from; base < to; base += ROWS) {
                const int count = min(ROWS, to - base);
                __syncthreads();
                load<Q_TYPE, DIM>(all.q, params.q, base, count, head);
                load<D_OUT_TYPE, V_DIM>(all.d_out, params.d_out, base, count, head);
                __syncthreads();
                float products[PAIRS], dp[PAIRS];
#pragma unroll
                for (int p = 0; p < PAIRS; p++) {
                    products[p] = dp[p] = 0.0f;
                }
                for (int d = 0; d < DIM; d++) {
                    const float x = all.k[row][d];
#pragma unroll
                    for (int p = 0; p < PAIRS; p++) {
                        products[p] += x * all.q[lane + p * SPLIT][d];
                    }
                }
                for (int d = 0; d < V_DIM; d++) {
                    const float x = all.v[row][d];
#pragma unroll
                    for (int p = 0; p < PAIRS; p++) {
                        dp[p] += x * all.d_out[lane + p * SPLIT][d];
                    }
                }
                const int seen_from = max(low - base, 0), seen_to = min(high - base, count);
#pragma unroll
                for (int p = 0; p < PAIRS; p++) {
                    const int query = lane + p * SPLIT;
                    if (seen_from <= query && query < seen_to) {
                        const int i = base + query - tile.q;
                        const i64 state = (i64)head * params.queries + base + query;
                        const Pair got = pair(params, tile, head, i, j, products[p], dp[p], saved(params, state));
                        all.weights[row][query] = got.weight;
                        all.ds[row][query] = got.ds;
                    }
                }
                __syncthreads();
                for (int query = seen_from; query < seen_to; query++) {
                    const float weight = all.weights[row][query], ds = all.ds[row][query];
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) {
                        const int column = lane + c * SPLIT;
                        if (column < DIM) {
                            dk[c] += ds * all.q[query][column];
                        }
                    }
#pragma unroll
                    for (int c = 0; c < V_COLUMNS; c++) {
                        const int column = lane + c * SPLIT;
                        if (column < V_DIM) {
                            dv[c] += weight * all.d_out[query][column];
                        }
                    }
                }
            }
        }
    }
    if (in_range) {
        float *const to_k = params.dk + ((i64)token * params.kv_heads + kv_head) * DIM;
        float *const to_v = params.dv + ((i64)token * params.kv_heads + kv_head) * V_DIM;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const int column = lane + c * SPLIT;
            if (column < DIM) {
                to_k[column] += dk[c];
            }
        }
#pragma unroll
        for (int c = 0; c < V_COLUMNS; c++) {
            const int column = lane + c * SPLIT;
            if (column < V_DIM) {
                to_v[column] += dv[c];
            }
        }
    }
}

// Adds the bucket gradients of all blocks, in the order of the blocks.
extern "C" __global__ void __launch_bounds__(THREADS) sum_buckets(const Params params) {
    const i64 count = (i64)params.heads * params.buckets, at = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (at >= count) {
        return;
    }
    double sum = 0.0;
    for (int block = 0; block < params.blocks; block++) {
        sum += params.d_table[block * count + at];
    }
    params.d_table_sum[at] += (float)sum;
}
