// What CUDA C++ has and C++ has not, for kernels on fibers.
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

extern "C" thread_local Index threadIdx, blockIdx, blockDim, gridDim;
// Shared memory of the block that runs: of the greatest size, of which a launch asks for a part.
extern "C" thread_local float shared[58112];
extern "C" void barrier();
// Replaces the value by that of another thread of the warp, by its lane.
extern "C" void shuffle(void *value, size_t size, unsigned lane);

// Also the mark by which kernels are found in a preprocessed source.
#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ thread_local
#define __launch_bounds__(threads)
#define __syncthreads() barrier()

using std::isnan;
using std::max;
using std::min;
using std::signbit;

// A kernel with what a launch gives: where each parameter lies.
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

// Threads of a block run one at a time, and blocks one after the other.
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

