// What CUDA C++ has and C++ has not, for kernels on fibers.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

struct Index {
    unsigned x, y, z;
};

extern "C" thread_local Index threadIdx, blockIdx, gridDim;
// Shared memory of the block that runs: of the greatest size, of which a launch asks for a part.
extern "C" thread_local float shared[58112];
extern "C" void barrier();

#define __global__
#define __device__
#define __shared__ thread_local
#define __launch_bounds__(threads)
#define __syncthreads() barrier()

using std::max;
using std::min;

inline float __int_as_float(int bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
