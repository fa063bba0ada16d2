// The parts of CUDA C++ that C++ does not have, for kernels that run on fibers.
#pragma once
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>

struct Index {
    unsigned x, y, z;
};

// `__thread` is for variables without constructor: each access to a `thread_local` of another library checks for construction.
extern "C" __thread Index threadIdx, blockIdx, blockDim, gridDim;
// Shared memory of the running thread block, with the maximum size; a launch uses a part of it.
extern "C" {
alignas(16) extern __thread float shared[58112];
}
extern "C" void barrier();
// Replaces the value by that of the thread with this lane in the warp.
extern "C" void shuffle(void *value, size_t size, unsigned lane);
// Writes the values of all threads of the warp to `all`, by lane.
extern "C" void exchange(const void *value, size_t size, void *all);
// A barrier that returns whether any thread of the block passed true.
extern "C" bool any_of_block(bool yes);
// Asynchronous copies of a thread: starts one, closes a group of them, and completes all but the last `left` groups.
extern "C" void later(void *to, const void *from, size_t size);
extern "C" void close_group();
extern "C" void finish_groups(size_t left);
// The same for products, which are computed when they are waited for, or as soon as they are started.
extern "C" void later_product(const std::function<void()> &product);
extern "C" void close_products();
extern "C" void finish_products(size_t left);
// Makes the completed copies of this thread visible to products.
extern "C" void share_copies();
// Fails unless products may read the 16 bytes of shared memory at this address.
extern "C" void check_shared(const void *at);

// `__global__` is also the mark by which kernels are found in a preprocessed source.
#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ thread_local
#define __launch_bounds__(threads)
#define __syncthreads() barrier()
#define __syncthreads_or(...) any_of_block(__VA_ARGS__)

using std::isnan;
using std::max;
using std::min;
using std::signbit;

// Binds a kernel to the parameters of a launch, given by their addresses.
template <class... Parameters, size_t... I>
std::function<void()> *bound_with(void (*kernel)(Parameters...), void **at, std::index_sequence<I...>) {
    std::tuple<std::remove_cv_t<Parameters>...> given(*static_cast<std::remove_cv_t<Parameters> *>(at[I])...);
    return new std::function<void()>([=] { std::apply(kernel, given); });
}

template <class... Parameters> std::function<void()> *bound(void (*kernel)(Parameters...), void **at) {
    return bound_with(kernel, at, std::index_sequence_for<Parameters...>());
}

template <class To, class From> To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "of one size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline float __int_as_float(int bits) { return same_bits<float>(bits); }
inline float __uint_as_float(unsigned bits) { return same_bits<float>(bits); }
inline int __float_as_int(float x) { return same_bits<int>(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
inline double __longlong_as_double(long long bits) { return same_bits<double>(bits); }
inline long long __double_as_longlong(double x) { return same_bits<long long>(x); }

struct alignas(8) float2 {
    float x, y;
};

struct alignas(16) float4 {
    float x, y, z, w;
};

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline double normcdf(double x) { return 0.5 * std::erfc(-x * 0.70710678118654752); }
inline float normcdff(float x) { return static_cast<float>(normcdf(x)); }

template <class T> T __shfl_xor_sync(unsigned, T value, int mask, int = 32) {
    static_assert(sizeof(T) <= 16, "as wide as a slot");
    shuffle(&value, sizeof value, (threadIdx.x % 32) ^ static_cast<unsigned>(mask));
    return value;
}

template <class T> T __shfl_sync(unsigned, T value, int lane, int = 32) {
    static_assert(sizeof(T) <= 16, "as wide as a slot");
    shuffle(&value, sizeof value, static_cast<unsigned>(lane));
    return value;
}

// The inline assembly of tensor.cu, by the tables of the PTX ISA that say which thread has which element of a fragment.

inline float of_bf16(unsigned word, unsigned half) { return __uint_as_float(word >> 16 * half << 16); }

inline void multiply(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    unsigned all_a[32][4], all_b[32][2];
    exchange(a, sizeof a, all_a);
    exchange(b, sizeof b, all_b);
    const unsigned lane = threadIdx.x % 32;
    for (unsigned at = 0; at < 4; at++) {
        const unsigned column = lane % 4 * 2 + at % 2;
        for (unsigned k = 0; k < 16; k++) {
            const unsigned in_row = k % 8 / 2;
            sums[at] += of_bf16(all_a[lane / 4 * 4 + in_row][k / 8 * 2 + at / 2], k % 2) *
                        of_bf16(all_b[column * 4 + in_row][k / 8], k % 2);
        }
    }
}

// The addresses of the rows of four matrices, one from each thread of a warp.
inline void matrix_rows(const unsigned short *row, const unsigned short *(&rows)[32]) {
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) {
        __builtin_trap();
    }
    exchange(&row, sizeof row, rows);
}

inline void read_matrices(unsigned (&to)[4], const unsigned short *row) {
    const unsigned short *rows[32];
    matrix_rows(row, rows);
    const unsigned lane = threadIdx.x % 32;
    for (unsigned n = 0; n < 4; n++) {
        std::memcpy(&to[n], rows[n * 8 + lane / 4] + lane % 4 * 2, 4);
    }
}

inline void read_transposed(unsigned (&to)[4], const unsigned short *row) {
    const unsigned short *rows[32];
    matrix_rows(row, rows);
    const unsigned lane = threadIdx.x % 32;
    for (unsigned n = 0; n < 4; n++) {
        const unsigned first = n * 8 + lane % 4 * 2;
        to[n] = rows[first][lane / 4] | static_cast<unsigned>(rows[first + 1][lane / 4]) << 16;
    }
}

inline void start_copy(unsigned short *to, const void *from, bool there) {
    if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) {
        __builtin_trap();
    }
    later(to, there ? from : nullptr, 16);
}

inline void group_copies() { close_group(); }

template <int LEFT> void wait_copies() { finish_groups(LEFT); }

inline unsigned pair_of(float low, float high) {
    const auto rounded = [](float x) {
        const unsigned bits = __float_as_uint(x);
        return std::isnan(x) ? 0x7FFFu : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    };
    return rounded(low) | rounded(high) << 16;
}

// The inline assembly of warpgroup.cu. A descriptor gives the address and strides of a factor, in units of 16 bytes.

inline unsigned shared_address(const void *at) {
    return static_cast<unsigned>(static_cast<const char *>(at) - reinterpret_cast<const char *>(shared));
}

// A factor of a product, in core matrices of 8 x 8, whose rows run along the summed dim or along the other one.
struct Side {
    const char *first;
    unsigned next_summed, next_other;
    bool along_other;

    Side(unsigned long long descriptor, bool along_other_) : along_other(along_other_) {
        const auto field = [=](unsigned low) { return static_cast<unsigned>(descriptor >> low & 0x3FFF) * 16; };
        first = reinterpret_cast<const char *>(shared) + field(0);
        next_summed = field(16);
        next_other = field(32);
    }

    // The row of 8 elements of a core matrix that contains element [other, summed].
    const unsigned short *row(unsigned other, unsigned summed) const {
        const char *core = first + summed / 8 * next_summed + other / 8 * next_other;
        const auto *at = reinterpret_cast<const unsigned short *>(core + (along_other ? summed : other) % 8 * 16);
        check_shared(at);
        return at;
    }
};

// Reads a thread's part of the left factor of a product over 16 terms: its row, and the row eight below.
inline void read_left(float (&left)[2][16], unsigned long long a) {
    const Side side(a, false);
    const unsigned row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    for (unsigned half = 0; half < 2; half++) {
        for (unsigned first = 0; first < 16; first += 8) {
            const unsigned short *elements = side.row(row + 8 * half, first);
            for (unsigned k = 0; k < 8; k++) {
                left[half][first + k] = of_bf16(elements[k], 0);
            }
        }
    }
}

// Adds a thread's part of a product over 16 terms.
template <int TILES_OF>
void add_product(float (*sums)[4], const float (&left)[2][16], unsigned long long b, bool along_other) {
    const Side side(b, along_other);
    for (unsigned n = 0; n < TILES_OF; n++) {
        // Two neighbouring columns, which are in one row of a core matrix, or in two.
        const unsigned other = n * 8 + threadIdx.x % 4 * 2;
        for (unsigned first = 0; first < 16; first += 8) {
            float right[2][8];
            for (unsigned k = 0; k < 8 && along_other; k++) {
                const unsigned short *elements = side.row(other, first + k);
                right[0][k] = of_bf16(elements[other % 8], 0);
                right[1][k] = of_bf16(elements[other % 8 + 1], 0);
            }
            for (unsigned e = 0; e < 2 && !along_other; e++) {
                const unsigned short *elements = side.row(other + e, first);
                for (unsigned k = 0; k < 8; k++) {
                    right[e][k] = of_bf16(elements[k], 0);
                }
            }
            for (unsigned k = 0; k < 8; k++) {
                for (unsigned e = 0; e < 2; e++) {
                    sums[n][e] += left[0][first + k] * right[e][k];
                    sums[n][2 + e] += left[1][first + k] * right[e][k];
                }
            }
        }
    }
}

template <int TILES_OF>
void start_product(float (&sums)[TILES_OF][4], unsigned long long a, unsigned long long b, bool adds) {
    float(*const to)[4] = sums;
    later_product([=] {
        float left[2][16];
        read_left(left, a);
        if (!adds) {
            std::memset(to, 0, sizeof(float[TILES_OF][4]));
        }
        add_product<TILES_OF>(to, left, b, false);
    });
}

template <int TILES_OF> void start_product(float (&sums)[TILES_OF][4], const unsigned (&a)[4], unsigned long long b) {
    float(*const to)[4] = sums;
    const unsigned *const from = a;
    later_product([=] {
        unsigned all[32][4];
        exchange(from, sizeof all[0], all);
        float left[2][16];
        for (unsigned k = 0; k < 16; k++) {
            const unsigned(&words)[4] = all[threadIdx.x % 32 / 4 * 4 + k % 8 / 2];
            left[0][k] = of_bf16(words[k / 8 * 2], k % 2);
            left[1][k] = of_bf16(words[k / 8 * 2 + 1], k % 2);
        }
        add_product<TILES_OF>(to, left, b, true);
    });
}

inline void order_registers() {}
inline void group_products() { close_products(); }
template <int LEFT> void wait_products() { finish_products(LEFT); }
template <int TILES_OF> void take_sums(float (&)[TILES_OF][4]) {}
inline float power_of_2(float x) { return std::exp2(x); }

// Threads of a block run one at a time, and blocks one after the other, so atomic operations are plain ones.
template <class T, class U> T atomicAdd(T *at, U x) {
    const T old = *at;
    *at = static_cast<T>(old + x);
    return old;
}

template <class T, class U> T atomicMax(T *at, U x) {
    const T old = *at;
    *at = std::max(old, static_cast<T>(x));
    return old;
}

template <class T, class U> T atomicMin(T *at, U x) {
    const T old = *at;
    *at = std::min(old, static_cast<T>(x));
    return old;
}

template <class T> T atomicCAS(T *at, T expected, T desired) {
    const T old = *at;
    *at = old == expected ? desired : old;
    return old;
}

