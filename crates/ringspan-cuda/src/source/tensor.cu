// Products of bf16 on tensor cores, with sums in f32 (PTX ISA, "Warp-level matrix instructions", since sm_80). This source follows
// `common.cu`.
//
// A block of threads computes ROWS rows, 16 for each warp, and reads the rows of the other side in chunks of CHUNK. Of a tile of
// 16 x 8 sums a thread holds four: [0] and [1] in row lane / 4 and columns 2 (lane % 4) and the next, [2] and [3] eight rows below.
// Rows in shared memory are padded by 16 bytes, so that one instruction reads eight of them without bank conflicts.

typedef unsigned short u16;

#define TILES (CHUNK / 8)
// The width of rows, rounded up to a multiple of 16, and the distance of rows in shared memory.
#define WIDTH ((DIM + 15) / 16 * 16)
#define V_WIDTH ((V_DIM + 15) / 16 * 16)
#define STRIDE (WIDTH + 8)
#define V_STRIDE (V_WIDTH + 8)

#define LANE (threadIdx.x % 32)
// The first row of the warp, and of the thread.
#define WARP_ROW (threadIdx.x / 32 * 16)
#define THREAD_ROW (WARP_ROW + LANE / 4)
// The first column of the thread in a tile of 8 columns.
#define THREAD_COLUMN (LANE % 4 * 2)

#ifdef __CUDACC__

__device__ inline u32 shared_address(const void *at) { return (u32)__cvta_generic_to_shared(at); }

// sums[16, 8] += a[16, 16] b[16, 8].
__device__ inline void multiply(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Reads four matrices of 8 x 8; each thread passes the address of row lane % 8 of matrix lane / 8.
__device__ inline void read_matrices(u32 (&to)[4], const u16 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Like `read_matrices`, with each matrix transposed.
__device__ inline void read_transposed(u32 (&to)[4], const u16 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Starts a copy of 16 bytes to shared memory; writes zeros instead if there is nothing to copy.
__device__ inline void start_copy(u16 *to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(to)), "l"(__cvta_generic_to_global(from)), "r"(there ? 16 : 0)
                 : "memory");
}

// Makes one group of the copies that this thread has started since the last call.
__device__ inline void group_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for this thread's copies, except for the last LEFT groups.
template <int LEFT> __device__ inline void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// Two numbers rounded to bf16, with the first in the lower half.
__device__ inline u32 pair_of(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

#endif

// Starts a copy of eight numbers of a tensor, or writes zeros; numbers of other types are rounded to bf16.
template <int TYPE> __device__ inline void start_piece(u16 *to, const View &from, i64 at, bool there) {
    if constexpr (TYPE == BF16) {
        start_copy(to, (const u16 *)from.data + at, there);
    } else {
#pragma unroll
        for (int c = 0; c < 8; c += 2) {
            const float low = there ? element<TYPE>(from.data, at + c) : 0.0f;
            const float high = there ? element<TYPE>(from.data, at + c + 1) : 0.0f;
            *(u32 *)(to + c) = pair_of(low, high);
        }
    }
}

// Starts a copy of HELD rows of a head from row `first` on; rows from `count` on become zeros.
template <int TYPE, int WIDTH_OF, int STRIDE_OF, int HELD>
__device__ void start_rows(u16 *to, const View &from, int first, int count, int head) {
    constexpr int PIECES = WIDTH_OF / 8;
    for (int n = threadIdx.x; n < HELD * PIECES; n += THREADS) {
        const int row = n / PIECES, column = n % PIECES * 8;
        const bool there = row < count;
        const i64 at = (first + (there ? row : 0)) * from.token_stride + head * from.head_stride + column;
        start_piece<TYPE>(to + row * STRIDE_OF + column, from, at, there);
    }
}

// Writes zeros to the columns beyond the width of the rows.
template <int WIDTH_OF, int STRIDE_OF> __device__ void clear_rest(u16 *rows, int count) {
    constexpr int REST = (WIDTH_OF + 15) / 16 * 16 - WIDTH_OF;
    if constexpr (REST > 0) {
        for (int n = threadIdx.x; n < count * REST; n += THREADS) {
            rows[n / REST * STRIDE_OF + WIDTH_OF + n % REST] = 0;
        }
    }
}

// Whether one of eight numbers is NaN or infinite.
__device__ inline bool is_non_finite(const u16 *piece) {
    bool any = false;
#pragma unroll
    for (int c = 0; c < 8; c++) {
        any = any || (piece[c] & 0x7F80u) == 0x7F80u;
    }
    return any;
}

// Whether a number that this thread copied is NaN or infinite.
template <int WIDTH_OF, int STRIDE_OF> __device__ bool has_non_finite(const u16 *rows) {
    constexpr int PIECES = WIDTH_OF / 8;
    bool any = false;
    for (int n = threadIdx.x; n < CHUNK * PIECES; n += THREADS) {
        any = any || is_non_finite(rows + n / PIECES * STRIDE_OF + n % PIECES * 8);
    }
    return any;
}

template <int TILES_OF> __device__ inline void clear(float (&sums)[TILES_OF][4]) {
#pragma unroll
    for (int n = 0; n < TILES_OF; n++) {
        sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
    }
}

// The sum, and the maximum, over the four threads that share a row.
__device__ inline float of_four(float x, bool greatest) {
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, x, lanes);
        x = greatest ? fmaxf(x, other) : x + other;
    }
    return x;
}

// sums[16 of the warp, CHUNK] = own[.., WIDTH_OF] others[CHUNK, ..]^T.
template <int WIDTH_OF, int STRIDE_OF>
__device__ inline void products(float (&sums)[TILES][4], const u16 *own, const u16 *others) {
    clear(sums);
#pragma unroll
    for (int at = 0; at < WIDTH_OF; at += 16) {
        u32 a[4];
        read_matrices(a, own + (WARP_ROW + LANE % 16) * STRIDE_OF + at + LANE / 16 * 8);
#pragma unroll
        for (int n = 0; n < TILES; n += 2) {
            u32 b[4];
            const int row = n * 8 + LANE / 16 * 8 + LANE % 8;
            read_matrices(b, others + row * STRIDE_OF + at + LANE / 8 % 2 * 8);
            multiply(sums[n], a, {b[0], b[1]});
            multiply(sums[n + 1], a, {b[2], b[3]});
        }
    }
}

// sums[16 of the warp, WIDTH_OF] += weights[16, CHUNK] others[CHUNK, ..], with weights rounded to bf16.
template <int WIDTH_OF, int STRIDE_OF>
__device__ inline void add_products(float (&sums)[WIDTH_OF / 8][4], const float (&weights)[TILES][4], const u16 *others) {
#pragma unroll
    for (int n = 0; n < TILES; n += 2) {
        const u32 a[4] = {pair_of(weights[n][0], weights[n][1]), pair_of(weights[n][2], weights[n][3]),
                          pair_of(weights[n + 1][0], weights[n + 1][1]), pair_of(weights[n + 1][2], weights[n + 1][3])};
#pragma unroll
        for (int at = 0; at < WIDTH_OF; at += 16) {
            u32 b[4];
            read_transposed(b, others + (n * 8 + LANE % 16) * STRIDE_OF + at + LANE / 16 * 8);
            multiply(sums[at / 8], a, {b[0], b[1]});
            multiply(sums[at / 8 + 1], a, {b[2], b[3]});
        }
    }
}

// Whether all `queries` rows from query `first` on see all `keys` rows from key `base` on.
__device__ inline bool sees_all(const Tile &tile, int first, int queries, int base, int keys) {
    const int i = first - tile.q, last_i = i + queries - 1, j = base - tile.k, last_j = j + keys - 1;
    const bool inside = i >= 0 && last_i < tile.queries && j >= 0 && last_j < tile.keys;
    return inside && last_i - j <= tile.hi && i - last_j >= tile.lo;
}

// For each of the thread's two rows, the rows of a chunk that it sees. The chunk has `count` rows from `base` on; the block's rows
// begin at `first`.
struct VisibleRows {
    int from[2], to[2];

    __device__ static VisibleRows by_queries(const Params &params, const Tile &tile, int first, int base, int count) {
        const int queries = min(tile.queries, params.queries - tile.q);
        return VisibleRows(first - tile.q, queries, -tile.hi, -tile.lo, tile.keys, base - tile.k, count);
    }

    __device__ static VisibleRows by_keys(const Params &params, const Tile &tile, int first, int base, int count) {
        const int keys = min(tile.keys, params.keys - tile.k);
        return VisibleRows(first - tile.k, keys, tile.lo, tile.hi, tile.queries, base - tile.q, count);
    }

    // Row x of `rows` sees rows x + low ..= x + high of `others`; all are counted from the start of the tile.
    __device__ VisibleRows(int first, int rows, int low, int high, int others, int base, int count) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int x = first + THREAD_ROW + 8 * half;
            const bool inside = 0 <= x && x < rows;
            from[half] = max((inside ? max(x + low, 0) : 0) - base, 0);
            to[half] = min((inside ? min(x + high + 1, others) : 0) - base, count);
        }
    }

    __device__ bool operator()(int pair, int at) const { return from[pair] <= at && at < to[pair]; }
};

// Like `add_products`, but one visible pair at a time: in a chunk with NaN or infinite numbers, products with weights of 0 would
// spread these to rows that do not see them.
template <int WIDTH_OF, int STRIDE_OF>
__device__ void add_visible(float (&sums)[WIDTH_OF / 8][4], const float (&weights)[TILES][4], const u16 *others, const VisibleRows &visible) {
    for (int at = 0; at < CHUNK; at++) {
        // The lane of the four that share a row which holds this column, and the column's index there.
        const int lane = LANE / 4 * 4 + at % 8 / 2;
        for (int half = 0; half < 2; half++) {
            float weight = 0.0f;
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                const float odd = at % 2 ? weights[n][2 * half + 1] : weights[n][2 * half];
                weight = n == at / 8 ? odd : weight;
            }
            weight = __shfl_sync(0xFFFFFFFFu, weight, lane);
            if (!visible(half, at)) {
                continue;
            }
#pragma unroll
            for (int n = 0; n < WIDTH_OF / 8; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    sums[n][2 * half + e] += weight * element<BF16>(others, at * STRIDE_OF + n * 8 + THREAD_COLUMN + e);
                }
            }
        }
    }
}

// Calls one of the two; all threads of the block take the same branch.
template <int WIDTH_OF, int STRIDE_OF>
__device__ inline void add_chunk(float (&sums)[WIDTH_OF / 8][4], const float (&weights)[TILES][4], const u16 *others,
                                 const VisibleRows &visible, bool has_special) {
    if (has_special) {
        add_visible<WIDTH_OF, STRIDE_OF>(sums, weights, others, visible);
    } else {
        add_products<WIDTH_OF, STRIDE_OF>(sums, weights, others);
    }
}

// Adds the thread's rows to gradients [tokens, heads, WIDTH_OF].
template <int WIDTH_OF, int TILES_OF>
__device__ inline void add_rows(float *to, const float (&sums)[TILES_OF][4], int first, int tokens, int heads, int head) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int token = first + THREAD_ROW + 8 * half;
        if (token >= tokens) {
            continue;
        }
        float *const row = to + ((i64)token * heads + head) * WIDTH_OF + THREAD_COLUMN;
#pragma unroll
        for (int n = 0; n < WIDTH_OF / 8; n++) {
            row[n * 8] += sums[n][2 * half];
            row[n * 8 + 1] += sums[n][2 * half + 1];
        }
    }
}

// The position of a block in its list of parts.
struct Chunk {
    int part, base;

    __device__ Chunk(const Params &params, int block) : part(params.parts_of[block]), base(params.parts[part].from) {}

    __device__ bool is_there(const Params &params, int block) const { return part < params.parts_of[block + 1]; }

    __device__ int count(const Params &params) const { return min(CHUNK, params.parts[part].to - base); }

    __device__ void advance(const Params &params, int block) {
        base += CHUNK;
        if (base >= params.parts[part].to) {
            part++;
            if (is_there(params, block)) {
                base = params.parts[part].from;
            }
        }
    }
};

// Reads the softmax state of the thread's two rows of a head. Each thread sums its own columns.
template <int TILES_OF>
__device__ inline void load_state(const Params &params, int head, int first, float (&greatest)[2], float (&sum)[2],
                                  float (&values)[TILES_OF][4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int token = first + THREAD_ROW + 8 * half;
        const bool in_range = token < params.queries;
        const i64 state = (i64)head * params.queries + token;
        greatest[half] = in_range ? params.max[state] : NEGATIVE_INFINITY;
        sum[half] = in_range && LANE % 4 == 0 ? params.sum[state] : 0.0f;
#pragma unroll
        for (int n = 0; n < TILES_OF; n++) {
            const bool here = in_range && n < V_DIM / 8;
            const float *const out = params.out + ((i64)token * params.heads + head) * V_DIM + n * 8 + THREAD_COLUMN;
            values[n][2 * half] = here ? out[0] : 0.0f;
            values[n][2 * half + 1] = here ? out[1] : 0.0f;
        }
    }
}

// Writes the softmax state back.
template <int TILES_OF>
__device__ inline void store_state(const Params &params, int head, int first, const float (&greatest)[2], const float (&sum)[2],
                                   const float (&values)[TILES_OF][4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int token = first + THREAD_ROW + 8 * half;
        const float whole_sum = of_four(sum[half], false);
        if (token >= params.queries) {
            continue;
        }
        if (LANE % 4 == 0) {
            const i64 state = (i64)head * params.queries + token;
            params.max[state] = greatest[half];
            params.sum[state] = whole_sum;
        }
        float *const out = params.out + ((i64)token * params.heads + head) * V_DIM + THREAD_COLUMN;
#pragma unroll
        for (int n = 0; n < V_DIM / 8; n++) {
            out[n * 8] = values[n][2 * half];
            out[n * 8 + 1] = values[n][2 * half + 1];
        }
    }
}
