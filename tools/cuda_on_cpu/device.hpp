// What the parts of the GPU on a CPU know of each other.
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

// As a number NaN, in any type.
constexpr unsigned char UNWRITTEN = 0xFF, FENCE = 0xA5;
constexpr size_t PAGE = 4096;

// Ends the process with a message.
[[noreturn]] void fail(const std::string &what);

Result allocate(uintptr_t *to, size_t size, int device);
Result release(uintptr_t at);
// Whether anybody may read or write it.
void open_or_close(uintptr_t at, bool open);

struct Buffer {
    size_t size;
    int device;
};

// What lies there.
Buffer buffer_at(uintptr_t at);

// Counts bytes that a call takes of a device, if it has them; and those that a call gives back.
Result count(size_t size, int device, bool of_pool);
void discount(size_t size, int device, bool of_pool);
// Fails unless the bytes lie within one buffer, of this device.
void check_copy(uintptr_t at, size_t size, int device);
// Memory of the CPU that a copy reads or writes when its turn comes.
Result pin(void **to, size_t size);
Result unpin(void *at);
// Whether bytes are in such memory.
bool is_pinned(const void *at, size_t size);

// Work in its order, done by whoever needs it.
struct Stream {
    int device;
    std::mutex queue_lock, running;
    std::deque<std::function<bool()>> queue;
    std::atomic<uint64_t> pushed{0}, done{0};

    void push(std::function<void()> work);
    // Work that is asked again until it says that it is done.
    void push_until(std::function<bool()> work);
    // Does what was pushed up to there.
    void run(uint64_t position);
    // Does one piece of it, or asks it; false if there was none.
    bool step(uint64_t position);
};

Stream *new_stream(int device);
// The device of the calling thread.
int device();
// That of a handle of the driver's.
Stream *stream(void *given);
// Does all that is left on any stream.
void run_all();

// Runs a block of threads, each of them `body`, with this much shared memory.
void run_block(size_t threads, size_t shared_bytes, const std::function<void()> &body);

// Compile a source to a library, whose path they return; it is empty where the compiler refuses, with its words in `log`.
// The first takes everything as it is, the second puts prelude.h before it, the third takes the place of a source of candle's.
std::string compile(const std::string &source, const std::string &flags, std::string &log);
std::string compile_text(const std::string &source, const std::string &flags, std::string &log);
std::string compile_candle(const std::string &include, std::string &log);
// What binds a kernel to the parameters of a launch.
std::string entry(const std::string &kernel);

struct Index {
    unsigned x, y, z;
};

// As in prelude.h.
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
