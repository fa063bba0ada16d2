// Products of bf16 by warpgroups, four warps each, with sums in f32 (PTX ISA, "Asynchronous warpgroup level matrix
// instructions", sm_90a only). This source follows `tensor.cu` and uses its fragments: a warp has 16 rows.
//
// Rows are stored in shared memory as core matrices of 8 rows x 8 columns, 128 bytes each: first those of the first 8 columns, row
// by row, then those of the next columns. So products can read them along columns and along rows without bank conflicts and without
// a swizzle. Products read shared memory through the async proxy while they run: `share_copies` makes earlier copies visible to it.

#define CORE 64
#define CORE_BYTES 128
// The width of rows that are the right side of a product: a multiple of 64 or 128 columns. The columns beyond the rows' width go
// to sums that nobody reads.
#define WHOLE_WIDTH ((DIM + 63) / 64 * 64)
#define WHOLE_V_WIDTH ((V_DIM + 63) / 64 * 64)
#define STEPS (CHUNK / 16)

#ifdef __CUDACC__

#define SUMS(n) "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])
#define FOUR_SUMS(n) SUMS(n), SUMS(n + 1), SUMS(n + 2), SUMS(n + 3)
#define EIGHT_SUMS(n) FOUR_SUMS(n), FOUR_SUMS(n + 4)

// Starts sums[64, 8 TILES_OF] = a[64, 16] b[8 TILES_OF, 16]^T, added to the sums if `adds`; descriptors say where both sides are.
// The sums must not be used before a wait.
template <int TILES_OF> __device__ inline void start_product(float (&sums)[TILES_OF][4], u64 a, u64 b, bool adds) {
    static_assert(TILES_OF == 8 || TILES_OF == 16, "64 or 128 columns");
    if constexpr (TILES_OF == 8) {
        asm volatile("{.reg .pred adds; setp.ne.b32 adds, %34, 0;"
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31},"
                     "%32, %33, adds, 1, 1, 0, 0;}"
                     : EIGHT_SUMS(0)
                     : "l"(a), "l"(b), "r"((int)adds));
    } else {
        asm volatile("{.reg .pred adds; setp.ne.b32 adds, %66, 0;"
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
                     "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
                     "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63},"
                     "%64, %65, adds, 1, 1, 0, 0;}"
                     : EIGHT_SUMS(0), EIGHT_SUMS(8)
                     : "l"(a), "l"(b), "r"((int)adds));
    }
}

// Starts sums[64, 8 TILES_OF] += a[64, 16] b[16, 8 TILES_OF], with the left side in registers.
template <int TILES_OF> __device__ inline void start_product(float (&sums)[TILES_OF][4], const u32 (&a)[4], u64 b) {
    if constexpr (TILES_OF == 8) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31},"
                     "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                     : EIGHT_SUMS(0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else {
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
                     "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
                     "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63},"
                     "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                     : EIGHT_SUMS(0), EIGHT_SUMS(8)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
}

// Orders earlier accesses to registers of products before the products that are started next.
__device__ inline void order_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Makes one group of the products that were started since the last call.
__device__ inline void group_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits for products, except for the last LEFT groups.
template <int LEFT> __device__ inline void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Keeps the compiler from moving uses of sums before the wait for the products that write them.
template <int TILES_OF> __device__ inline void take_sums(float (&sums)[TILES_OF][4]) {
#pragma unroll
    for (int n = 0; n < TILES_OF; n++) {
        asm volatile("" : SUMS(n)::"memory");
    }
}

// Makes the copies that this thread has waited for visible to products after the next barrier.
__device__ inline void share_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline float power_of_2(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

#endif

// The position of an element among TILE_ROWS rows.
template <int TILE_ROWS> __device__ inline int core_offset(int row, int column) {
    return (column / 8 * (TILE_ROWS / 8) + row / 8) * CORE + row % 8 * 8 + column % 8;
}

// The descriptor of a side of a product that begins at this address (PTX ISA, "Matrix descriptor", no swizzle): bytes from core to
// core along the summed dim, and along the other.
__device__ inline u64 descriptor(const u16 *at, int summed_bytes, int other_bytes) {
    return (u64)(shared_address(at) >> 4) | (u64)(summed_bytes >> 4) << 16 | (u64)(other_bytes >> 4) << 32;
}

// Position of the n-th group of 8 columns of TILE_ROWS rows: 8 threads copy one core, so that their copies use different banks.
template <int GROUPS> struct ColumnGroup {
    int row, column;

    __device__ ColumnGroup(int n) : row(n / (8 * GROUPS) * 8 + n % 8), column(n / 8 % GROUPS * 8) {}
};

// Starts a copy of TILE_ROWS rows of a head from row `first` on; rows from `count` on become zeros. Numbers of other types are
// rounded to bf16.
template <int TYPE, int WIDTH_OF, int TILE_ROWS>
__device__ void start_cores(u16 *to, const View &from, int first, int count, int head) {
    constexpr int GROUPS = WIDTH_OF / 8;
    for (int n = threadIdx.x; n < TILE_ROWS * GROUPS; n += THREADS) {
        const ColumnGroup<GROUPS> group(n);
        const bool there = group.row < count;
        const i64 at = (first + (there ? group.row : 0)) * from.token_stride + head * from.head_stride + group.column;
        start_piece<TYPE>(to + core_offset<TILE_ROWS>(group.row, group.column), from, at, there);
    }
}

// Writes zeros to columns FROM to TO of TILE_ROWS rows, which products sum over.
template <int FROM, int TO, int TILE_ROWS> __device__ void clear_cores(u16 *rows) {
    for (int n = threadIdx.x; n < TILE_ROWS * (TO - FROM); n += THREADS) {
        rows[FROM / 8 * TILE_ROWS / 8 * CORE + n] = 0;
    }
}

// Whether a number of the chunk that this thread copied is NaN or infinite.
template <int WIDTH_OF> __device__ bool has_non_finite_core(const u16 *rows) {
    constexpr int GROUPS = WIDTH_OF / 8;
    bool any = false;
    for (int n = threadIdx.x; n < CHUNK * GROUPS; n += THREADS) {
        const ColumnGroup<GROUPS> group(n);
        any = any || is_non_finite(rows + core_offset<CHUNK>(group.row, group.column));
    }
    return any;
}

// Starts sums[64 of the warpgroup, CHUNK] = own[.., WIDTH_OF] others[CHUNK, ..]^T.
template <int WIDTH_OF> __device__ inline void start_scores(float (&sums)[TILES][4], const u16 *own, const u16 *others) {
    const int row = threadIdx.x / 128 * 64;
#pragma unroll
    for (int at = 0; at < WIDTH_OF; at += 16) {
        const u64 left = descriptor(own + core_offset<ROWS>(row, at), ROWS * 16, CORE_BYTES);
        start_product(sums, left, descriptor(others + core_offset<CHUNK>(0, at), CHUNK * 16, CORE_BYTES), at > 0);
    }
}

// Weights rounded to bf16, as the left side of products.
__device__ inline void pack(u32 (&packed)[STEPS][4], const float (&weights)[TILES][4]) {
#pragma unroll
    for (int n = 0; n < TILES; n++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            packed[n / 2][n % 2 * 2 + half] = pair_of(weights[n][2 * half], weights[n][2 * half + 1]);
        }
    }
}

// Starts sums[64, 8 TILES_OF] += weights[64, CHUNK] others[CHUNK, ..].
template <int TILES_OF>
__device__ inline void start_sums(float (&sums)[TILES_OF][4], const u32 (&weights)[STEPS][4], const u16 *others) {
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        start_product(sums, weights[step], descriptor(others + core_offset<CHUNK>(16 * step, 0), CORE_BYTES, CHUNK * 16));
    }
}

// Computes the same without starting a product, one visible pair at a time: in a chunk with NaN or infinite numbers, products with
// weights of 0 would spread these to rows that do not see them.
template <int TILES_OF>
__device__ void add_visible_cores(float (&sums)[TILES_OF][4], const u32 (&weights)[STEPS][4], const u16 *others,
                                  const VisibleRows &visible) {
    for (int at = 0; at < CHUNK; at++) {
        // The lane of the four that share a row which holds this column.
        const int lane = LANE / 4 * 4 + at % 8 / 2;
        for (int half = 0; half < 2; half++) {
            u32 both = 0;
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                const u32 word = at % 16 < 8 ? weights[step][half] : weights[step][2 + half];
                both = step == at / 16 ? word : both;
            }
            both = __shfl_sync(0xFFFFFFFFu, both, lane);
            if (!visible(half, at)) {
                continue;
            }
            const float weight = __uint_as_float(at % 2 ? both & 0xFFFF0000u : both << 16);
#pragma unroll
            for (int n = 0; n < TILES_OF; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    sums[n][2 * half + e] += weight * element<BF16>(others, core_offset<CHUNK>(at, n * 8 + THREAD_COLUMN + e));
                }
            }
        }
    }
}

// Overwrites a chunk that all threads have read with zeros, for products that are still to come.
template <int TO> __device__ inline void forget(u16 *rows) {
    __syncthreads();
    clear_cores<0, TO, CHUNK>(rows);
    share_copies();
    __syncthreads();
}
