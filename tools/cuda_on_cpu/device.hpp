// What the parts of the GPU on a CPU know of each other.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

enum Result { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500, NOT_READY = 600 };

// As a number NaN, in any type.
constexpr unsigned char UNWRITTEN = 0xFF, FENCE = 0xA5;
constexpr size_t PAGE = 4096;

// Ends the process with a message.
[[noreturn]] void fail(const std::string &what);

Result allocate(uintptr_t *to, size_t size);
Result release(uintptr_t at);
// Fails unless the bytes lie within one buffer.
void check_copy(uintptr_t at, size_t size);

// Runs a block of threads, each of them `body`, with this much shared memory.
void run_block(size_t threads, size_t shared_bytes, const std::function<void()> &body);

struct Index {
    unsigned x, y, z;
};

// As in prelude.h.
extern "C" {
extern thread_local Index threadIdx, blockIdx, gridDim;
extern thread_local float shared[58112];
void barrier();
}
