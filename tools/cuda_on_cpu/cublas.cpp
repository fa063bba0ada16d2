// The matrix products of cuBLAS that candle calls: batches of column-major matrices with a constant stride.
#include "device.hpp"
#include "include/cuda_bf16.h"
#include "include/cuda_fp16.h"
#include <vector>

namespace {

enum Type { F32 = 0, F16 = 2, BF16 = 14 };
enum { COMPUTE_F32 = 68 };

float read(const void *from, long long at, int type) {
    switch (type) {
    case F32: return static_cast<const float *>(from)[at];
    case F16: return static_cast<const __half *>(from)[at];
    case BF16: return static_cast<const __nv_bfloat16 *>(from)[at];
    default: fail("cuBLAS is asked for a type of number " + std::to_string(type));
    }
}

void write(void *to, long long at, int type, float x) {
    switch (type) {
    case F32: static_cast<float *>(to)[at] = x; break;
    case F16: static_cast<__half *>(to)[at] = x; break;
    case BF16: static_cast<__nv_bfloat16 *>(to)[at] = x; break;
    default: fail("cuBLAS is asked for a type of number " + std::to_string(type));
    }
}

struct Stored {
    const void *data;
    int type, leading;
    long long stride;
    int device;

    // Matrix number `batch`, [rows, cols] after the optional transposition, column-major.
    std::vector<float> matrix(int batch, bool transposed, int rows, int cols) const {
        const int height = transposed ? cols : rows, width = transposed ? rows : cols;
        if (leading < height) {
            fail("cuBLAS is given columns of " + std::to_string(height) + " numbers that lie " + std::to_string(leading) + " apart");
        }
        const long long first = batch * stride, last = first + static_cast<long long>(width - 1) * leading + height;
        const long long bytes = type == F32 ? 4 : 2;
        check_copy(reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(first * bytes),
                   static_cast<size_t>((last - first) * bytes), device);
        std::vector<float> all(static_cast<size_t>(rows) * static_cast<size_t>(cols));
        for (int col = 0; col < cols; col++) {
            for (int row = 0; row < rows; row++) {
                const long long at = transposed ? static_cast<long long>(row) * leading + col : static_cast<long long>(col) * leading + row;
                all[static_cast<size_t>(col) * static_cast<size_t>(rows) + static_cast<size_t>(row)] = read(data, first + at, type);
            }
        }
        return all;
    }
};

} // namespace

extern "C" {

// A handle points to its stream.
int cublasCreate_v2(void **handle) {
    *handle = new void *(nullptr);
    return 0;
}

int cublasDestroy_v2(void *handle) {
    delete static_cast<void **>(handle);
    return 0;
}

int cublasSetStream_v2(void *handle, void *given) {
    *static_cast<void **>(handle) = given;
    return 0;
}

int cublasGemmStridedBatchedEx(void *handle, int a_op, int b_op, int m, int n, int k, const void *alpha, const void *a,
                               int a_type, int a_leading, long long a_stride, const void *b, int b_type, int b_leading,
                               long long b_stride, const void *beta, void *c, int c_type, int c_leading, long long c_stride,
                               int count, int compute, int) {
    if (m <= 0 || n <= 0 || k <= 0 || count <= 0 || c_leading < m || compute != COMPUTE_F32) {
        return 7;
    }
    // The output is read only if beta is not 0.
    const float factor = *static_cast<const float *>(alpha), before = *static_cast<const float *>(beta);
    Stream *on = stream(*static_cast<void **>(handle));
    const Stored left{a, a_type, a_leading, a_stride, on->device}, right{b, b_type, b_leading, b_stride, on->device};
    on->push([=] {
        std::vector<float> sums(static_cast<size_t>(m));
        const size_t width = c_type == F32 ? 4 : 2;
        for (int batch = 0; batch < count; batch++) {
            const std::vector<float> x = left.matrix(batch, a_op != 0, m, k), y = right.matrix(batch, b_op != 0, k, n);
            for (int col = 0; col < n; col++) {
                sums.assign(static_cast<size_t>(m), 0);
                for (int i = 0; i < k; i++) {
                    const float weight = y[static_cast<size_t>(col) * static_cast<size_t>(k) + static_cast<size_t>(i)];
                    const float *column = x.data() + static_cast<size_t>(i) * static_cast<size_t>(m);
                    for (size_t row = 0; row < static_cast<size_t>(m); row++) {
                        sums[row] += column[row] * weight;
                    }
                }
                const long long first = batch * c_stride + static_cast<long long>(col) * c_leading;
                check_copy(reinterpret_cast<uintptr_t>(c) + static_cast<uintptr_t>(first) * width, static_cast<size_t>(m) * width,
                           on->device);
                for (int row = 0; row < m; row++) {
                    const float there = before == 0 ? 0 : before * read(c, first + row, c_type);
                    write(c, first + row, c_type, factor * sums[static_cast<size_t>(row)] + there);
                }
            }
        }
    });
    return 0;
}
}
