// The forward pass: adds the keys of the tiles to the softmax state of the queries (Milakov and Gimelshein, 2018).
//
// A block of threads computes ROWS queries of one head; SPLIT threads share a query, and each computes every SPLIT-th key of its
// scores and every SPLIT-th column of its output. Keys and values use the same buffer in turn.

#define WIDE (DIM > V_DIM ? DIM : V_DIM)
#define COLUMNS ((V_DIM + SPLIT - 1) / SPLIT)

extern "C" __global__ void __launch_bounds__(THREADS) forward(const Params params) {
    extern __shared__ float shared[];
    float(*q)[DIM + 1] = (float(*)[DIM + 1])shared;
    float *both = shared + ROWS * (DIM + 1);
    float(*k)[DIM + 1] = (float(*)[DIM + 1])both;
    float(*v)[V_DIM + 1] = (float(*)[V_DIM + 1])both;
    float(*scores)[ROWS + 1] = (float(*)[ROWS + 1])(both + ROWS * (WIDE + 1));

    const int block = blockIdx.x, head = blockIdx.y, kv_head = params.kv_of[head];
    const int row = threadIdx.x / SPLIT, lane = threadIdx.x % SPLIT;
    const int first = block * ROWS, token = first + row;
    const bool in_range = token < params.queries;
    if (params.parts_of[block] == params.parts_of[block + 1]) {
        return;
    }
    load<Q_TYPE, DIM>(q, params.q, first, min(ROWS, params.queries - first), head);

    const i64 state = (i64)head * params.queries + token;
    float *const out = params.out + ((i64)token * params.heads + head) * V_DIM;
    float greatest = in_range ? params.max[state] : NEGATIVE_INFINITY, sum = in_range ? params.sum[state] : 0.0f;
    float values[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        const int column = lane + c * SPLIT;
        values[c] = in_range && column < V_DIM ? out[column] : 0.0f;
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
            __syncthreads(); // All threads have used the values before these.
            load<K_TYPE, DIM>(k, params.k, base, count, kv_head);
            __syncthreads();
            float products[PAIRS];
#pragma unroll
            for (int p = 0; p < PAIRS; p++) {
                products[p] = 0.0f;
            }
            for (int d = 0; d < DIM; d++) {
                const float x = q[row][d];
#pragma unroll
                for (int p = 0; p < PAIRS; p++) {
                    products[p] += x * k[lane + p * SPLIT][d];
                }
            }
            const int seen_from = max(low - base, 0), seen_to = min(high - base, count);
#pragma unroll
            for (int p = 0; p < PAIRS; p++) {
                const int key = lane + p * SPLIT;
                if (seen_from <= key && key < seen_to) {
                    float slope;
                    const int j = base + key - tile.k;
                    scores[row][key] = score(params, tile, head, i, j, products[p], slope);
                }
            }
            __syncthreads();
            load<V_TYPE, V_DIM>(v, params.v, base, count, kv_head);
            const float before = greatest;
            for (int key = seen_from; key < seen_to; key++) {
                greatest = fmaxf(greatest, scores[row][key]);
            }
            // The shift is finite, so that subtracting it from -inf gives no NaN.
            const float shift = greatest == NEGATIVE_INFINITY ? 0.0f : greatest;
            const float shrink = exp2f((before - shift) * LOG2_E);
            sum *= shrink;
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                values[c] *= shrink;
            }
            __syncthreads();
            for (int key = seen_from; key < seen_to; key++) {
                float weight = exp2f((scores[row][key] - shift) * LOG2_E);
                sum += weight;
                weight *= kept(params, tile, head, i, base + key - tile.k);
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
                    const int column = lane + c * SPLIT;
                    if (column < V_DIM) {
                        values[c] += weight * v[key][column];
                    }
                }
            }
        }
    }

    if (in_range) {
        if (lane == 0) {
            params.max[state] = greatest;
            params.sum[state] = sum;
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const int column = lane + c * SPLIT;
            if (column < V_DIM) {
                out[column] = values[c];
            }
        }
    }
}
