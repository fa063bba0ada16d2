// The interfaces between the parts of the emulated GPU.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

enum Result { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500, NOT_READY = 600 };

// UNWRITTEN is a byte of NaN in every floating-point type; FENCE fills the gaps around buffers.
constexpr unsigned char UNWRITTEN = 0xFF, FENCE = 0xA5;
constexpr size_t PAGE = 4096;

// Ends the process with a message.
[[noreturn]] void fail(const std::string &what);

Result allocate(uintptr_t *to, size_t size, int device);
Result release(uintptr_t at);
// Allows or forbids access to a buffer.
void open_or_close(uintptr_t at, bool open);

struct Buffer {
    size_t size;
    int device;
};

// The buffer at an address.
Buffer buffer_at(uintptr_t at);

// Count bytes that a call allocates on a device, if they are free, and bytes that a call frees.
Result count(size_t size, int device, bool of_pool);
void discount(size_t size, int device, bool of_pool);
// Fails unless the bytes are within one buffer of this device.
void check_copy(uintptr_t at, size_t size, int device);
// Pinned CPU memory, which a copy reads or writes when its stream reaches the copy.
Result pin(void **to, size_t size);
Result unpin(void *at);
// Whether bytes are in pinned memory.
bool is_pinned(const void *at, size_t size);

// Work in order, run by the threads that need it.
struct Stream {
    int device;
    std::mutex queue_lock, running;
    std::deque<std::function<bool()>> queue;
    std::atomic<uint64_t> pushed{0}, done{0};

    void push(std::function<void()> work);
    // Work that is polled until it returns true.
    void push_until(std::function<bool()> work);
    // Runs all work that was pushed before `position`.
    void run(uint64_t position);
    // Runs or polls one piece of that work; returns false if none is left.
    bool step(uint64_t position);
};

Stream *new_stream(int device);
// The device of the calling thread.
int device();
// The stream of a driver's handle.
Stream *stream(void *given);
// Runs all remaining work of all streams.
void run_all();

// Runs a block of threads, each of them `body`, with this much shared memory.
void run_block(size_t threads, size_t shared_bytes, const std::function<void()> &body);

// Compile a source to a library and return its path, or an empty path and the compiler's message in `log`. The first compiles
// the source as it is, the second with prelude.h before it, the third a source of candle's, given by an #include of its path.
std::string compile(const std::string &source, const std::string &flags, std::string &log);
std::string compile_text(const std::string &source, const std::string &flags, std::string &log);
std::string compile_candle(const std::string &include, std::string &log);
// Source text of the function that binds a kernel to the parameters of a launch.
std::string entry(const std::string &kernel);

struct Index {
    unsigned x, y, z;
};

// The same declarations as in prelude.h.
extern "C" {
extern __thread Index threadIdx, blockIdx, blockDim, gridDim;
alignas(16) extern __thread float shared[58112];
void barrier();
void shuffle(void *value, size_t size, unsigned lane);
void exchange(const void *value, size_t size, void *all);
bool any_of_block(bool yes);
void later(void *to, const void *from, size_t size);
void close_group();
void finish_groups(size_t left);
void later_product(const std::function<void()> &product);
void close_products();
void finish_products(size_t left);
void share_copies();
void check_shared(const void *at);
}
